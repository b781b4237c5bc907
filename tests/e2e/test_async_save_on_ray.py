"""Checkpoints that two ranks and a separate critic, each in its own process, write in the background."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tandem.checkpoint import open_checkpoint
from tandem.observability.run import read_metrics
from tests.e2e.ray_runs import RayRun, command
from tests.e2e.shop import Shop
from tests.e2e.test_kill import assert_identical, last_state
from tests.support import slow_writes
from tests.support.runs import without_times

pytestmark = pytest.mark.e2e

SLOW = Path(slow_writes.__file__)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_beside_training_on_ray(shop: Shop, tmp_path: Path) -> None:
    """One run saves while training waits. Another saves in the background and is killed during a save.

    The other run's actor takes longer to write than a step takes. It is killed while step 2 is being written.
    """
    at_once = RayRun.start(command(shop, "ray_at_once", 3), shop.folder / "ray_at_once")
    printed = at_once.end(180)
    assert at_once.process.returncode == 0, printed

    folder = shop.folder / "ray_beside"
    words = [
        *command(shop, "ray_beside", 3),
        "trainer.async_save=true",
        f"trainer.worker_classes.actor_rollout={SLOW}:SlowWrites",
    ]
    killed = RayRun.start(words, folder, SLOW_WRITES_S="60")
    killed.await_phase("update_actor", after_step=2)
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == ["step_000001", "step_000002.tmp"]
    killed.harm("policy_1", signal.SIGKILL)
    printed = killed.end(90)
    assert killed.process.returncode == 1, printed
    assert killed.survivors() == []
    assert "step_000002" not in [path.name for path in (folder / "checkpoints").iterdir()]

    resumed = RayRun.start(words, folder, SLOW_WRITES_S="0.5")
    printed = resumed.end(180)
    assert resumed.process.returncode == 0, printed
    assert "step_000001 after step 1" in printed
    assert resumed.survivors() == []
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert checkpoints == ["step_000002", "step_000003"]
    assert all(open_checkpoint(folder / "checkpoints" / name).step == int(name[-1]) for name in checkpoints)
    rows, wanted = (read_metrics(f / "metrics.jsonl") for f in (folder, shop.folder / "ray_at_once"))
    assert without_times(rows) == without_times(wanted)
    assert_identical(last_state(folder, tmp_path), last_state(shop.folder / "ray_at_once", tmp_path))
