"""A run that is killed at any moment and started again equals an undisturbed run, bit for bit."""

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tandem.checkpoint import open_checkpoint
from tandem.observability.files import whole_lines
from tandem.observability.run import read_metrics, read_samples
from tests.e2e.ray_runs import PHASES, slow, writing_slowly
from tests.e2e.shop import Shop, finish, start
from tests.support.runs import without_times

pytestmark = pytest.mark.e2e


def command(shop: Shop, name: str, steps: int) -> list[str]:
    return slow(
        *(shop, name, steps),
        "algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=100",
        "A.optim.lr_scheduler_type=cosine A.shuffle=true",
        "trainer.val_before_train=true trainer.max_ckpt_to_keep=3",
    )


class Moment(NamedTuple):
    """When to kill a process: in a phase of its second step, so that each process leaves a finished step."""

    phase: str
    delay_s: float = 0.0


def kill_at(moment: Moment, words: list[str], folder: Path) -> bool:
    """Run the command and kill it; return whether it died in that phase, which may have just ended."""
    process = start(words, folder.parent)
    phases = Phases(folder / "timeline.json", process.pid)
    while not phases.in_second_step(moment.phase):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
        phases.read()
    time.sleep(moment.delay_s)
    process.kill()
    finish(process)
    phases.read()
    return moment.phase in phases.unfinished


class Phases:
    def __init__(self, timeline: Path, pid: int) -> None:
        self.begun: list[str] = []
        self.unfinished: list[str] = []
        self._timeline = timeline
        self._pid = pid
        self._at = timeline.stat().st_size if timeline.exists() else 0

    def read(self) -> None:
        if not self._timeline.exists() or self._timeline.stat().st_size == self._at:
            return
        with self._timeline.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._at += len(new)
        for line in new.splitlines():
            event = {} if line == b"[" else json.loads(line.rstrip(b","))
            if event.get("pid") == self._pid:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["ph"] == "B":
            self.begun.append(event["name"])
            self.unfinished.append(event["name"])
        elif event["ph"] == "E":
            self.unfinished.remove(event["name"])

    def in_second_step(self, phase: str) -> bool:
        steps = [place for place, name in enumerate(self.begun) if name == "step"]
        return len(steps) >= 2 and phase in self.begun[steps[1] :]


def last_state(run: Path, scratch: Path) -> dict[str, Any]:
    """Return the newest checkpoint: all tensors (models, moments, versions) and the trainer's own state."""
    newest = max((run / "checkpoints").iterdir())
    state: dict[str, Any] = dict(open_checkpoint(newest).state["trainer"])
    for member in ("actor", "critic"):
        file = scratch / f"{run.name}_{member}.pt"
        dcp_to_torch_save(newest / member, file)
        state[member] = torch.load(file)
    return state


def assert_identical(a: Any, b: Any, at: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), at
        for name in a:
            assert_identical(a[name], b[name], f"{at}.{name}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), at
    else:
        assert a == b, at


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoints/*"))


def compare(killed: Path, whole: Path, steps: int, scratch: Path) -> None:
    lines = whole_lines(killed / "metrics.jsonl")
    rows = read_metrics(killed / "metrics.jsonl")
    assert len(lines) == len(rows) == steps + 1
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert without_times(rows) == without_times(read_metrics(whole / "metrics.jsonl"))
    assert_identical(last_state(killed, scratch), last_state(whole, scratch))
    names = [path.name for path in sorted((whole / "samples").iterdir())]
    assert [path.name for path in sorted((killed / "samples").iterdir())] == names
    for name in names:
        assert read_samples(killed / "samples" / name) == read_samples(whole / "samples" / name), name
    assert checkpoints(killed) == [f"step_{step:06d}" for step in (steps - 2, steps - 1, steps)]


def run_with_kills(shop: Shop, moments: list[Moment], steps: int, scratch: Path, tries: int = 1) -> set[str]:
    """Return the phases that were hit; a moment has some tries, because its phase may end before the kill."""
    whole = start(command(shop, "whole", steps), shop.folder)
    words = command(shop, "killed", steps)
    folder = shop.folder / "killed"
    hit = {moment.phase for moment in moments if any(kill_at(moment, words, folder) for _ in range(tries))}
    for process in (whole, start(words, shop.folder)):
        assert finish(process).returncode == 0, process.stderr
    compare(shop.folder / "killed", shop.folder / "whole", steps, scratch)
    return hit


@pytest.mark.slow
def test_three_kills(shop, tmp_path):
    moments = [Moment("update_actor"), Moment("save_checkpoint", 0.05), Moment("gen")]
    assert run_with_kills(shop, moments, steps=6, scratch=tmp_path), "every kill came between phases"


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_kills_in_every_phase_all_through_a_save_and_at_random(shop, tmp_path, monkeypatch):
    """The run that ends on its own leaves nothing behind: the temporary folder is as it was before."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    draw = random.Random(0)
    moments = [Moment(phase) for phase in PHASES]
    moments += [Moment("save_checkpoint", delay) for delay in (0.02, 0.05, 0.08, 0.11, 0.15, 0.2)]
    moments += [Moment(name, draw.random() * 0.2) for name in draw.sample(PHASES, len(PHASES)) * 2]
    assert run_with_kills(shop, moments, steps=120, scratch=tmp_path, tries=3) == set(PHASES)
    assert [path.name for path in place.iterdir() if path.name.startswith(("tandem", "pymp"))] == []


@pytest.mark.slow
def test_killed_during_a_background_write(shop, tmp_path, monkeypatch):
    steps, run = 5, shop.folder / "killed_beside"
    whole = start(command(shop, "whole_beside", steps), shop.folder)
    words = writing_slowly(command(shop, run.name, steps))
    monkeypatch.setenv("SLOW_WRITES_S", "240")
    process = start(words, shop.folder)
    limit, left = time.monotonic() + 120, ["step_000001", "step_000002.tmp"]
    while left[1] not in checkpoints(run) or not (run / "samples" / "step_000003.parquet").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, process.kill()
        time.sleep(0.01)
    process.kill()
    finish(process)
    assert checkpoints(run) == left
    monkeypatch.setenv("SLOW_WRITES_S", "0.2")
    for ended in (whole, start(words, shop.folder)):
        done = finish(ended)
        assert done.returncode == 0, done.stderr
    assert "step_000001 after step 1" in done.stdout
    compare(run, shop.folder / "whole_beside", steps, tmp_path)
