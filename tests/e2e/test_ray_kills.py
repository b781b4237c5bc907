import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tandem.checkpoint import open_checkpoint
from tandem.observability.run import read_metrics
from tests.e2e.ray_runs import PHASES, POOLS, RayRun, command, writing_slowly
from tests.e2e.shop import Shop
from tests.e2e.test_kill import assert_identical, checkpoints, last_state
from tests.support.runs import without_times
from tests.support.warm import cold

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 150
STEP_S = 20  # a step takes half a second, but a busy machine needs longer


class Harm(NamedTuple):
    """A signal, or an order to the reward function, to a process POOL_RANK in a phase of its second step."""

    how: str
    whom: str
    phase: str


def do(harm: Harm, words: list[str], folder: Path) -> None:
    order = folder.parent / "order"
    run = RayRun.start(words, folder)
    run.await_phase(harm.phase, after_step=1)
    victim = run.pids[harm.whom]
    if harm.how.startswith("SIG"):
        run.harm(harm.whom, signal.Signals[harm.how])
    else:
        order.write_text(harm.how)
    start = time.monotonic()
    printed = run.ends(1, LIMIT_S)
    order.unlink(missing_ok=True)
    assert time.monotonic() - start < LIMIT_S
    assert f"pid {victim}" in printed, printed
    assert printed.count("  other processes:") == 1, printed
    assert "Traceback (most recent call last):\n  File" not in printed  # the controller prints no traceback


def harmed_and_resumed(shop: Shop, name: str, harms: list[Harm], steps: int) -> None:
    folder = shop.folder / name
    words = command(shop, name, steps)
    for number, harm in enumerate(harms):
        do(harm, words, folder)
        assert max(row["step"] for row in read_metrics(folder / "metrics.jsonl")) > number
    last, limit_s = RayRun.start(words, folder), 180 + STEP_S * steps
    assert "resumed from" in last.ends(0, limit_s)
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    alone = RayRun.start(command(shop, f"{name}_alone", steps), shop.folder / f"{name}_alone")
    alone.ends(0, limit_s)
    whole = read_metrics(shop.folder / f"{name}_alone" / "metrics.jsonl")
    for name in ("reward/mean", "actor/loss", "critic/loss", "actor/grad_norm"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in whole], rel=1e-4, abs=1e-6)


def test_killed_and_resumed(shop):
    harmed_and_resumed(shop, "harmed", [Harm("SIGKILL", "policy_1", "update_actor")], steps=4)


@pytest.mark.timeout(3600)
def test_every_worker_in_every_phase(shop):
    draw = random.Random(0)
    whom = [f"{pool}_{rank}" for pool, ranks in POOLS.items() for rank in range(ranks)]
    harms = [Harm("SIGKILL", whom[i % len(whom)], phase) for i, phase in enumerate(PHASES)]
    harms += [Harm("SIGKILL", draw.choice(whom), draw.choice(PHASES)) for _ in range(4)]
    harms += [Harm("SIGSTOP", draw.choice(whom), draw.choice(PHASES)) for _ in range(2)]
    harmed_and_resumed(shop, "often_harmed", harms, steps=24)


def test_a_reward_function_that_does_harm(shop):
    harms = [Harm(how, "reward_pool_0", "reward") for how in ("sleep", "raise", "memory")]
    harmed_and_resumed(shop, "harmed_by_reward", harms, steps=10)


def test_ray_ends_a_worker_for_its_memory(shop):
    """Ray's memory monitor, which checks after the start, is told that 2% of the memory is too much."""
    folder = shop.folder / "greedy"
    limits = {"RAY_memory_usage_threshold": "0.02", "RAY_memory_monitor_refresh_ms": "45000"}
    run = RayRun.start(command(shop, "greedy", 1000), folder, **limits)
    printed = run.ends(1)
    assert "killed due to the node running low on memory" in printed
    assert "GiB when last seen" in printed


def test_restarts_by_itself(shop):
    folder = shop.folder / "restarted"
    run = RayRun.start(command(shop, "restarted", 4, "trainer.max_restarts=2"), folder)
    for step in (1, 2):
        run.await_phase("update_actor", after_step=step)
        before = run.pids
        run.harm("policy_0", signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while run.pids in ({}, before) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert run.ends(0).count("its process died") == 2
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]


def look_inside(run: RayRun) -> None:
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
    done = cold("-m", "tandem", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ctrl_c_once_saves_and_twice_stops(shop):
    folder = shop.folder / "interrupted"
    words = command(shop, "interrupted", 100, "trainer.save_freq=-1")
    once = RayRun.start(words, folder)
    once.await_phase("update_critic", after_step=1)
    look_inside(once)
    os.killpg(once.process.pid, signal.SIGINT)  # like a terminal, which signals all processes of the run
    assert "the same command resumes from it" in once.ends(130)
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl")]
    twice = RayRun.start(words, folder)
    twice.await_phase("gen", after_step=1)
    for _ in range(2):
        os.killpg(twice.process.pid, signal.SIGINT)
        time.sleep(0.3)
    printed = twice.ends(130)
    assert f"resumed from {folder / 'checkpoints' / f'step_{steps[-1]:06d}'}" in printed


def test_a_sigterm_to_the_controller_saves(shop):
    run = RayRun.start(command(shop, "ended", 100, "trainer.save_freq=-1"), shop.folder / "ended")
    run.await_phase("update_critic", after_step=1)
    run.process.terminate()
    assert "the same command resumes from it" in run.ends(130, LIMIT_S)


def test_killed_during_a_background_write_on_ray(shop, tmp_path):
    whole, folder = shop.folder / "ray_at_once", shop.folder / "ray_beside"
    RayRun.start(command(shop, whole.name, 3), whole).ends(0)
    words = writing_slowly(command(shop, folder.name, 3))
    killed = RayRun.start(words, folder, SLOW_WRITES_S="60")
    killed.await_phase("update_actor", after_step=2)
    assert checkpoints(folder) == ["step_000001", "step_000002.tmp"]
    killed.harm("policy_1", signal.SIGKILL)
    killed.ends(1, 90)
    assert "step_000002" not in checkpoints(folder)
    resumed = RayRun.start(words, folder, SLOW_WRITES_S="0.5")
    assert "step_000001 after step 1" in resumed.ends(0)
    assert checkpoints(folder) == ["step_000002", "step_000003"]
    assert [open_checkpoint(folder / "checkpoints" / name).step for name in checkpoints(folder)] == [2, 3]
    rows, wanted = (read_metrics(run / "metrics.jsonl") for run in (folder, whole))
    assert without_times(rows) == without_times(wanted)
    assert_identical(last_state(folder, tmp_path), last_state(whole, tmp_path))
