import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tandem.observability.files import whole_lines
from tests.e2e.shop import SOURCES, Shop
from tests.support import slow_writes
from tests.support.warm import WarmProcess

ESTIMATOR = """
import time
from tandem.algorithms.advantages.gae import gae

def slow_gae(token_level_rewards, values, response_mask, offsets, *, gamma=1.0, lam=1.0):
    time.sleep(0.05)
    return gae(token_level_rewards, values, response_mask, offsets, gamma=gamma, lam=lam)
"""
REWARD = """
import time
from pathlib import Path

ORDER = Path(__file__).with_name("order")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ORDER.exists():
        order = ORDER.read_text()
        if order == "sleep":
            time.sleep(1000)
        if order == "raise":
            raise OSError("the judge cannot be reached")
        if order == "memory":
            bytearray(2**50)
    time.sleep(0.005)
    return len(set(solution_str)) / 6
"""
"""Workers that wait a moment, so that their phases last long enough to be hit. The reward obeys a file."""

PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
PHASES += ("save_checkpoint", "testing")
POOLS = {"policy": 2, "value": 1, "reward_pool": 1, "controller_pool": 1}


def slow(shop: Shop, name: str, steps: int, *more: str) -> list[str]:
    estimator, reward = shop.folder / "slow_estimator.py", shop.folder / "slow_reward.py"
    estimator.write_text(ESTIMATOR)
    reward.write_text(REWARD)
    return shop.document(
        f"algorithm.adv_estimator={estimator}:slow_gae custom_reward_function.path={reward}",
        "algorithm.use_kl_in_reward=true A.optim.lr=0.003 trainer.logger=[]",
        f"trainer.test_freq=1 trainer.save_freq=1 steps={steps}",
        f"trainer.default_local_dir={shop.folder / name}",
        *more,
    )


def command(shop: Shop, name: str, steps: int, *more: str) -> list[str]:
    return slow(
        *(shop, name, steps),
        "trainer.max_ckpt_to_keep=2",
        "trainer.timeouts.answer=20 trainer.timeouts.call=60 trainer.timeouts.stop=5",
        "Q={policy: [2], value: [1]} P={actor_rollout: policy, critic: value}",
        *more,
    )


def writing_slowly(command: list[str]) -> list[str]:
    """Save in the background, with an actor that takes `SLOW_WRITES_S` for all checkpoints but the first."""
    worker = f"trainer.worker_classes.actor_rollout={slow_writes.__file__}:SlowWrites"
    return [*command, "trainer.async_save=true", worker]


@dataclass
class RayRun:
    """A `tandem train` on Ray; its process is the controller, or starts it."""

    process: subprocess.Popen[str]
    folder: Path
    controller_is_leader: bool = True

    @classmethod
    def start(cls, words: list[str], folder: Path, **environment: str) -> Self:
        (folder / "log" / "processes.json").unlink(missing_ok=True)
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCES), **environment}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        options = {"cwd": folder.parent, "env": os.environ | own, "start_new_session": True, **streams}
        return cls(WarmProcess([sys.executable, "-m", "tandem", "train", *words], **options), folder)

    @property
    def pids(self) -> dict[str, int]:
        """Return the process ids by POOL_RANK; empty before the workers are up."""
        return {name: pid for name, (_, pid) in self.places.items()}

    @property
    def places(self) -> dict[str, tuple[str, int]]:
        """Return the node address and process id by POOL_RANK; empty before the workers are up."""
        file = self.folder / "log" / "processes.json"
        if not file.exists():
            return {}
        content = json.loads(file.read_text() or "{}")
        if self.controller_is_leader and content.get("controller") != self.process.pid:
            return {}
        found = content.get("processes", ())
        return {process["name"]: (process["node"], process["pid"]) for process in found}

    def await_phase(self, phase: str, *, after_step: int, limit_s: float = 400) -> None:
        """Wait until this run is in that phase of a step later than `after_step`, or was just in it."""
        deadline = time.monotonic() + limit_s
        while not self._in(phase, after_step):
            assert time.monotonic() < deadline, f"{phase} never came:\n{self.end()}"
            assert self.process.poll() is None, self.end()
            time.sleep(0.01)

    @property
    def _controller(self) -> int:
        content = json.loads((self.folder / "log" / "processes.json").read_text())
        return int(content["controller"])

    def _in(self, phase: str, after_step: int) -> bool:
        timeline = self.folder / "timeline.json"
        if not self.pids or not timeline.exists():
            return False
        own = {self._controller, *self.pids.values()}
        steps = 0
        for line in whole_lines(timeline)[1:]:
            event: dict[str, Any] = json.loads(line.rstrip(","))
            if event["pid"] not in own or event["ph"] != "B":
                continue
            steps += event["name"] == "step"
            if event["name"] == phase and steps > after_step:
                return True
        return False

    def harm(self, name: str, sent: signal.Signals) -> None:
        os.kill(self.pids[name], sent)

    def end(self, limit_s: float = 60) -> str:
        try:
            printed, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            printed, _ = self.process.communicate()
            raise AssertionError(f"still there after {limit_s} s:\n{printed}") from None
        return printed

    def ends(self, status: int, limit_s: float = 180) -> str:
        """Check that the run ends with this exit status and leaves no process, and return what it printed."""
        printed = self.end(limit_s)
        assert self.process.returncode == status, printed
        assert self.survivors() == []
        return printed

    def survivors(self, limit_s: float = 10) -> list[str]:
        deadline = time.monotonic() + limit_s
        while (left := _session(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


def _session(leader: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(stat.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()[:150])
        except OSError:  # the process has ended in the meantime
            continue
    return found
