import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "scoreboard.json"


@pytest.fixture
def board(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return pytest.importorskip("scoreboard")


def run(seconds: float, steps: int, *, reached: bool = True) -> dict[str, Any]:
    curve = [[0, 0.0, 0.25], [steps, seconds, 0.9 if reached else 0.5]]
    return {"reached": reached, "cpu_seconds": seconds, "wall_seconds": 9.0, "steps": steps, "curve": curve}


def test_medians_and_ratios_of_seeds(board):
    rows = [
        {"task": "arithmetic", "seed": i, "tandem": run(ours, 20), "trl": run(theirs, 30, reached=i > 0)}
        for i, (ours, theirs) in enumerate([(10.0, 30.0), (20.0, 30.0), (15.0, 15.0)])
    ]
    lines = board.table({"rows": rows}).splitlines()
    assert lines[2:] == ["| `arithmetic` | 3 | 3 | 15.0 | 20 | 2 | 30.0 | 30 | 1.50 (1.00 to 3.00) |"]
    drawn = board.figure({"rows": rows})
    assert drawn.count('stroke="#1b6ca8"') == drawn.count('stroke="#c44536"') == 3


def test_the_page_shows_the_results_that_are_there(board):
    report = json.loads(RESULTS.read_text())
    assert board.table(report) in (ROOT / "docs" / "scoreboard.md").read_text()
    assert RESULTS.with_suffix(".svg").read_text() == board.figure(report)
