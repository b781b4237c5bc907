"""Unusual ends of a run: a second signal, and a disk that is full at any moment."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tandem.observability.files import whole_lines
from tests.e2e.shop import Shop, finish, start

pytestmark = pytest.mark.e2e

SLOW = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(1000)
"""
PROMPT_S = 5.0
"""The time limit for a reaction. It takes one second, but a busy machine needs longer."""


@pytest.mark.parametrize("apart_s", [0.02, 1.0])
def test_a_second_signal_ends_a_step_at_once(shop: Shop, tmp_path: Path, apart_s: float) -> None:
    """The first signal waits for the step, which never ends in this test."""
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    run = tmp_path / "run"
    words = shop.short("unused", f"trainer.default_local_dir={run}")
    process = start([*words, f"custom_reward_function.path={tmp_path / 'slow.py'}"], tmp_path)
    while not begun(run / "timeline.json", "reward"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    time.sleep(apart_s)
    second = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert time.monotonic() - second < PROMPT_S
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith("stopped\n")
    assert "stopped" in whole_lines(run / "log" / "run.log")[-1]
    last = json.loads(whole_lines(run / "events.jsonl")[-1])
    assert (last["event"], last["how"]) == ("end", "interrupted")
    assert not (run / "run.lock").exists()


@pytest.mark.parametrize("size_k", [4, 16, 28, pytest.param(40, marks=pytest.mark.slow)])
def test_a_disk_that_is_full(shop: Shop, tmp_path: Path, size_k: int) -> None:
    """The disk is full at the start, before the first step, in it, or when samples are written."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_k}k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a disk here")
    try:
        words = shop.short("unused", f"trainer.default_local_dir={disk / 'run'}", "trainer.save_freq=1")
        done = finish(start(words, tmp_path))
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert f"{disk / 'run'}/" in done.stderr and "No space left on device" in done.stderr
        assert not (disk / "run" / "run.lock").exists()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def begun(timeline: Path, phase: str) -> bool:
    return timeline.exists() and f'"name": "{phase}"' in timeline.read_text("utf-8")
