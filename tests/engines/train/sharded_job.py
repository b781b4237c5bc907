"""A job that loads a folder without ever holding the whole model, or saves a checkpoint, or resumes.

load SMALL FOLDER RESULTS           records what each rank read, held and computed
save FOLDER SAVED RESULTS           two steps, checkpoints (in the foreground and background), one more step
resume FOLDER SAVED RESULTS         loads the checkpoints of another number of ranks, then takes one step
"""

import ctypes
import sys
import threading
import time
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist

from tandem.engines.train.fsdp import FSDPEngine
from tandem.models import weight_files
from tandem.models.parallel import leave_distributed
from tandem.protocol import DataProto

M_MMAP_THRESHOLD = -3
PRECISIONS = ("fp64", "fp32")
MICRO = synthetic.CUTS["three"]


def anonymous_bytes():
    """Return this process's own memory in bytes, without mapped files."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Watch:
    """A context that measures the largest growth of this process's memory."""

    def __enter__(self):
        self.before = self.most = anonymous_bytes()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self):
        while not self.ended.is_set():
            self.most = max(self.most, anonymous_bytes())
            time.sleep(0.001)

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    @property
    def grown(self):
        return self.most - self.before


def load(small, folder, results):
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000)  # return freed memory to the system
    synthetic.make_engine(small, precision="fp64", frozen=True)  # libraries allocate memory at first use
    bytes_read = 0
    read = weight_files._read

    def counted(handle, name, part):
        nonlocal bytes_read
        value = read(handle, name, part)
        bytes_read += value.nbytes
        return value

    weight_files._read = counted
    grown = []
    warm_up = FSDPEngine._warm_up
    with Watch() as watch:
        FSDPEngine._warm_up = lambda self, *model: (grown.append(watch.grown), warm_up(self, *model))
        engine = synthetic.make_engine(folder, precision="fp64", frozen=True)
    critic = synthetic.make_engine(folder, precision="fp64", kind="value")
    tokens = DataProto({"tokens": synthetic.make_batch().ragged("tokens")})
    out = engine.forward(tokens, outputs=frozenset({"log_probs"}), micro=MICRO)
    record = {
        "bytes_read": bytes_read // 2,  # for one of the two engines
        "grown": grown[0],
        "own": engine.state_info()["parameters@cpu"],
        "weights": synthetic.weights(engine),
        "head": dict(synthetic.weights(critic))["value_head.weight"],
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
        "log_probs": out.ragged("log_probs").values,
    }
    torch.save(record, results / f"rank_{dist.get_rank()}.pt")


def my_rows(batch):
    return batch[dist.get_rank() :: dist.get_world_size()]


def step(engine, precision):
    batch = synthetic.make_batch(torch.float64 if precision == "fp64" else torch.float32)
    engine.train_step(my_rows(batch), synthetic.SyntheticLoss(), micro=MICRO)


def whole_state(engine):
    """Return whole weights and moments by name."""
    found = {f"model.{name}": value for name, value in synthetic.weights(engine).items()}
    for name, parameter in engine._state.named().items():
        for key, value in engine._state._slots[parameter].items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{key}.{name}"] = value.clone()
    return found


def save(folder, saved, results):
    """Save in the foreground and in the background, and record the states.

    The background write is delayed until the next training step is done.
    """
    record = {}
    for precision in PRECISIONS:
        engine = synthetic.make_engine(folder, precision=precision)
        for _ in range(2):
            step(engine, precision)
        engine.save(saved / precision / "at_once")
        write = engine.stage(saved / precision / "beside")
        trained = threading.Event()
        thread = threading.Thread(target=lambda write=write, go=trained: (go.wait(60), write()))
        thread.start()
        before = whole_state(engine)
        step(engine, precision)
        trained.set()
        step(engine, precision)
        thread.join(60)
        assert not thread.is_alive()
        record[precision] = {"saved": before}
        engine.load(saved / precision / "beside")
        record[precision]["beside"] = whole_state(engine)
        engine.load(saved / precision / "at_once")
        record[precision]["at_once"] = whole_state(engine)
        step(engine, precision)
        record[precision]["next"] = whole_state(engine)
    keep(record, results / "saved.pt")


def resume(folder, saved, results):
    record = {}
    for precision in PRECISIONS:
        engine = synthetic.make_engine(folder, precision=precision)
        record[precision] = {}
        for way in ("at_once", "beside"):
            engine.load(saved / precision / way)
            assert engine.version == 2
            record[precision][way] = whole_state(engine)
            step(engine, precision)
            record[precision][f"{way}, next"] = whole_state(engine)
    keep(record, results / f"resumed_{dist.get_world_size()}.pt")


def keep(record, path):
    if dist.get_rank() == 0:
        torch.save(record, path)


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    {"load": load, "save": save, "resume": resume}[what](*map(Path, paths))
    leave_distributed(together=True)
