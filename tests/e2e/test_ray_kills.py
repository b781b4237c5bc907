"""A process of a run on Ray is damaged in any way: the run stops with one report within the time limit.

It leaves no process behind, and the same command resumes from its last checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.observability.run import read_metrics
from tests.e2e.ray_runs import POOLS, RayRun, command
from tests.e2e.shop import SOURCES, Shop

pytestmark = pytest.mark.e2e

LIMIT_S = 150
PHASES = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "save_checkpoint",
    "testing",
)


@dataclass(frozen=True)
class Harm:
    """How a run is damaged.

    Attributes:
        how: The name of a signal, or an order to the reward function.
        whom: The process to damage, as POOL_RANK.
        phase: The phase to damage it in, in the second step of the process.
    """

    how: str
    whom: str
    phase: str

    def __str__(self) -> str:
        return f"{self.how} {self.whom} in {self.phase}"


def do(harm: Harm, words: list[str], folder: Path) -> None:
    """Run the command, damage it, and check how it ends."""
    order = folder.parent / "order"
    run = RayRun.start(words, folder)
    run.await_phase(harm.phase, after_step=1)
    victim = run.pids[harm.whom]
    if harm.how.startswith("SIG"):
        run.harm(harm.whom, signal.Signals[harm.how])
    else:
        order.write_text(harm.how)
    start = time.monotonic()
    printed = run.end(LIMIT_S)
    order.unlink(missing_ok=True)
    assert time.monotonic() - start < LIMIT_S
    assert run.process.returncode == 1, printed
    assert f"pid {victim}" in printed, printed
    assert printed.count("  other processes:") == 1, printed
    assert "Traceback (most recent call last):\n  File" not in printed  # the controller prints no traceback
    assert run.survivors() == []


def harmed_and_resumed(shop: Shop, name: str, harms: list[Harm], steps: int) -> None:
    """Damage a run in each way in turn, then let it finish, and compare it with a run that was left alone."""
    folder = shop.folder / name
    words = command(shop, name, steps)
    for number, harm in enumerate(harms):
        do(harm, words, folder)
        assert max(row["step"] for row in read_metrics(folder / "metrics.jsonl")) > number
    last = RayRun.start(words, folder)
    printed = last.end(180 + 5 * steps)
    assert last.process.returncode == 0, printed
    assert "resumed from" in printed
    assert last.survivors() == []
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    alone = RayRun.start(command(shop, f"{name}_alone", steps), shop.folder / f"{name}_alone")
    printed = alone.end(180 + 5 * steps)
    assert alone.process.returncode == 0, printed
    whole = read_metrics(shop.folder / f"{name}_alone" / "metrics.jsonl")
    for name in ("reward/mean", "actor/loss", "critic/loss", "actor/grad_norm"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in whole], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_resumed(shop: Shop) -> None:
    harmed_and_resumed(shop, "harmed", [Harm("SIGKILL", "policy_1", "update_actor")], steps=4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_worker_in_every_phase(shop: Shop) -> None:
    """Damage the run 21 times: in each phase and each kind of worker, otherwise at random."""
    draw = random.Random(0)
    whom = [f"{pool}_{rank}" for pool, ranks in POOLS.items() for rank in range(ranks)]
    harms = [Harm("SIGKILL", whom[i % len(whom)], phase) for i, phase in enumerate(PHASES)]
    harms += [Harm("SIGKILL", draw.choice(whom), draw.choice(PHASES)) for _ in range(8)]
    harms += [Harm("SIGSTOP", draw.choice(whom), draw.choice(PHASES)) for _ in range(3)]
    harmed_and_resumed(shop, "often_harmed", harms, steps=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_reward_function_that_does_harm(shop: Shop) -> None:
    harms = [Harm(how, "reward_pool_0", "reward") for how in ("sleep", "raise", "memory")]
    harmed_and_resumed(shop, "harmed_by_reward", harms, steps=10)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_ends_a_worker_for_its_memory(shop: Shop) -> None:
    """Ray's memory monitor is told that 2% of this machine's memory is too much.

    It checks after the run has started.
    """
    folder = shop.folder / "greedy"
    limits = {"RAY_memory_usage_threshold": "0.02", "RAY_memory_monitor_refresh_ms": "45000"}
    run = RayRun.start(command(shop, "greedy", 1000), folder, **limits)
    printed = run.end(180)
    assert run.process.returncode == 1, printed
    assert "killed due to the node running low on memory" in printed
    assert "GiB when last seen" in printed
    assert run.survivors() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_restarts_by_itself(shop: Shop) -> None:
    folder = shop.folder / "restarted"
    run = RayRun.start(command(shop, "restarted", 4, "trainer.max_restarts=2"), folder)
    for step in (1, 2):
        run.await_phase("update_actor", after_step=step)
        before = run.pids
        run.harm("policy_0", signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while run.pids in ({}, before) and time.monotonic() < deadline:
            time.sleep(0.1)
    printed = run.end(180)
    assert run.process.returncode == 0, printed
    assert printed.count("its process died") == 2
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert run.survivors() == []


def look_inside(run: RayRun) -> None:
    """Use the command line to show the stacks of all processes and the log of one, while the run goes on."""
    stacks = tandem("stacks", str(run.folder))
    assert f"controller (node {socket.gethostname()}, pid {run.process.pid})" in stacks
    assert "in fit" in stacks
    for name, (address, pid) in run.places.items():
        own = stacks.split(f"── {name} (node {address}, pid {pid})\n")[1].split("── ")[0]
        assert own.startswith("thread "), own
    logs = {line.split()[0] for line in tandem("logs", str(run.folder)).splitlines()}
    assert {name for name in logs if not name.startswith("rewards-")} == {"run", *run.places}
    assert "resumed" not in tandem("logs", str(run.folder), "policy_1")
    assert run.process.poll() is None


def tandem(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tandem", *words],
        env=os.environ | {"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_once_saves_and_twice_stops(shop: Shop) -> None:
    folder = shop.folder / "interrupted"
    words = command(shop, "interrupted", 100, "trainer.save_freq=-1")
    once = RayRun.start(words, folder)
    once.await_phase("update_critic", after_step=1)
    look_inside(once)
    os.killpg(once.process.pid, signal.SIGINT)  # like a terminal, which signals all processes of the run
    printed = once.end(120)
    assert once.process.returncode == 130, printed
    assert "the same command resumes from it" in printed
    assert once.survivors() == []
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl")]
    twice = RayRun.start(words, folder)
    twice.await_phase("gen", after_step=1)
    for _ in range(2):
        os.killpg(twice.process.pid, signal.SIGINT)
        time.sleep(0.3)
    printed = twice.end(120)
    assert twice.process.returncode == 130, printed
    assert f"resumed from {folder / 'checkpoints' / f'step_{steps[-1]:06d}'}" in printed
    assert twice.survivors() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sigterm_to_the_controller_saves(shop: Shop) -> None:
    run = RayRun.start(command(shop, "ended", 100, "trainer.save_freq=-1"), shop.folder / "ended")
    run.await_phase("update_critic", after_step=1)
    run.process.terminate()
    printed = run.end(LIMIT_S)
    assert run.process.returncode == 130, printed
    assert "the same command resumes from it" in printed
    assert run.survivors() == []
