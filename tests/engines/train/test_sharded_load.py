"""Two ranks load a model, each at most its half. Checkpoints resume on fewer ranks."""

import ctypes
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.engines.train.fsdp import FSDPEngine
from tandem.models import weight_files
from tandem.protocol import DataProto
from tests.engines.train import synthetic
from tests.engines.train.on_ranks import on_ranks
from tests.engines.train.synthetic import make_engine

LARGE = synthetic.SHAPE | {
    **{"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 12},
    **{"num_key_value_heads": 4, "initializer_range": 0.02},
}
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6}
WAYS = ("at_once", "beside")


def anonymous_bytes():
    """Return this process's own memory in bytes, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


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


def loaded(small, folder):
    """Return what this rank read, held and computed when it loaded the folder."""
    malloc_mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(malloc_mmap_threshold, 1_000_000)  # freed memory goes to the system
    make_engine(small, frozen=True)  # libraries allocate memory at first use
    sizes, grown = [], []
    read, warm_up = weight_files._read, FSDPEngine._warm_up

    def counted(handle, name, part):
        value = read(handle, name, part)
        sizes.append(value.nbytes)
        return value

    weight_files._read = counted
    with Watch() as watch:
        FSDPEngine._warm_up = lambda self, *model: (grown.append(watch.grown), warm_up(self, *model))
        engine = make_engine(folder, frozen=True)
    bytes_read = sum(sizes)
    critic = make_engine(folder, kind="value")
    return {
        **{"bytes_read": bytes_read, "grown": grown[0], "own": engine.state_info()["parameters@cpu"]},
        **{"weights": synthetic.weights(engine), "head": synthetic.weights(critic)["value_head.weight"]},
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
        "log_probs": all_log_probs(engine),
    }


def all_log_probs(engine):
    return synthetic.output(engine, DataProto({"tokens": synthetic.make_batch().ragged("tokens")})).values


@pytest.mark.slow
def test_no_rank_holds_more_than_its_half(folder, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**LARGE))
    model.save_pretrained(tmp_path, max_shard_size="30MB")
    first, second = on_ranks(loaded, folder, tmp_path)
    stored = {name: p.detach().double() for name, p in model.named_parameters()}
    whole = sum(value.nbytes for value in stored.values())  # the model is loaded in fp64
    stored_bytes = whole // 2
    assert stored_bytes > 80e6
    for record in (first, second):
        assert 0.49 * stored_bytes < record["bytes_read"] < 0.51 * stored_bytes
        assert 0.49 * whole < record["own"] < 0.51 * whole
        assert 0.45 * whole < record["grown"] < 0.65 * whole
        assert synthetic.same(record["weights"], stored)
        assert record["head"].shape == (1, LARGE["hidden_size"]) and record["head"].abs().max() == 0
    assert first["bytes_read"] + second["bytes_read"] == stored_bytes
    wanted = {f"model.{name}": buffer for name, buffer in model.named_buffers()}
    assert wanted and synthetic.same(first["buffers"], wanted)
    alone = all_log_probs(make_engine(tmp_path, frozen=True))
    assert torch.allclose(first["log_probs"], alone, atol=1e-12, rtol=0)


# Checkpoints.


def step(engine, precision):
    batch = synthetic.batch_of(precision)
    synthetic.train(engine, batch[dist.get_rank() :: dist.get_world_size()])


def whole_state(engine):
    """Return whole weights and moments by name."""
    found = {f"model.{name}": value for name, value in synthetic.weights(engine).items()}
    for name, parameter in engine._state.named().items():
        for key, value in engine._state._slots[parameter].items():
            found[f"{key}.{name}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return found


def save(folder, saved, precision):
    """Take two steps and save at once, and beside the training: after its next step."""
    engine = make_engine(folder, precision=precision)
    for _ in range(2):
        step(engine, precision)
    engine.save(saved / precision / "at_once")
    write, trained = engine.stage(saved / precision / "beside"), threading.Event()
    thread = threading.Thread(target=lambda: (trained.wait(60), write()))
    thread.start()
    found = {"saved": whole_state(engine)}
    step(engine, precision)
    trained.set()
    step(engine, precision)
    thread.join(60)
    assert not thread.is_alive()
    return found | resume(folder, saved, precision, engine)


def resume(folder, saved, precision, engine=None):
    """Return the states of loaded checkpoints, and those after a further step."""
    engine, found = engine or make_engine(folder, precision=precision), {}
    for way in WAYS:
        engine.load(saved / precision / way)
        assert engine.version == 2
        found[way] = whole_state(engine)
        step(engine, precision)
        found[f"{way}, next"] = whole_state(engine)
    return found


def in_each_precision(function, folder, saved):
    return {precision: function(folder, saved, precision) for precision in TOLERANCE}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def saved(folder, tmp_path_factory, request):
    """Return checkpoints of several ranks after two steps, and the states of the first rank."""
    path = tmp_path_factory.mktemp("ranks")
    return path, on_ranks(in_each_precision, save, folder, path, ranks=request.param)[0]


@pytest.mark.slow
def test_what_is_written_beside_training_is_the_state_when_it_began(saved):
    for precision, record in saved[1].items():
        for way in WAYS:
            assert synthetic.same(record[way], record["saved"]), precision
            following = record[f"{way}, next"]
            assert any(
                (following[name] - value).abs().max() > 1e-4 for name, value in record["saved"].items()
            )


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 1])
def test_they_go_on_at_fewer(folder, saved, ranks):
    path, wanted = saved
    found = on_ranks(in_each_precision, resume, folder, path, ranks=ranks)[0]
    for precision, tolerance in TOLERANCE.items():
        for way in WAYS:
            assert synthetic.same(found[precision][way], wanted[precision]["saved"])
            after = found[precision][f"{way}, next"], wanted[precision]["at_once, next"]
            assert synthetic.relative_difference(*after) <= tolerance
