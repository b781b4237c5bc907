"""A run that is killed while a checkpoint is written in the background resumes from the checkpoint before.

The result equals that of a run that was not killed.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.shop import Shop, finish, start
from tests.e2e.test_kill import command, compare
from tests.support import slow_writes

pytestmark = pytest.mark.e2e

STEPS = 5
SLOW = Path(slow_writes.__file__)


def folders(run: Path) -> list[str]:
    place = run / "checkpoints"
    return sorted(path.name for path in place.iterdir()) if place.is_dir() else []


@pytest.mark.slow
def test_killed_during_a_background_write(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start(command(shop, "whole_beside", STEPS), shop.folder)
    run = shop.folder / "killed_beside"
    words = [
        *command(shop, "killed_beside", STEPS),
        "trainer.async_save=true",
        f"trainer.worker_classes.actor_rollout={SLOW}:SlowWrites",
    ]
    monkeypatch.setenv("SLOW_WRITES_S", "240")
    process = start(words, shop.folder)
    limit = time.monotonic() + 120
    while "step_000002.tmp" not in folders(run) or not (run / "samples" / "step_000003.parquet").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, process.kill()
        time.sleep(0.01)
    process.kill()
    finish(process)
    assert folders(run) == ["step_000001", "step_000002.tmp"]
    monkeypatch.setenv("SLOW_WRITES_S", "0.2")
    resumed = start(words, shop.folder)
    for ended in (whole, resumed):
        done = finish(ended)
        assert done.returncode == 0, done.stderr
    assert "step_000001 after step 1" in done.stdout
    compare(run, shop.folder / "whole_beside", STEPS, tmp_path)
