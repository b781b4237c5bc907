"""Run the tutorials from their own code blocks, and draw the curves at their end.

    python -m docs.tutorials [FOLDER] [NAME …]

FOLDER must contain runs/demo, which `tandem demo` writes. The points of the curves go into
benchmarks/results/tutorials.json, the pictures into docs/figures.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from docs.blocks import blocks
from docs.entries import ROOT
from tandem.observability.reading import Run
from tests.support.netns import cluster_network

RESULTS = ROOT / "benchmarks" / "results" / "tutorials.json"
FIGURES = ROOT / "docs" / "figures"
_WITHIN_S = 1800
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 560, 230, 44, 16, 150, 30
_COLOURS = ("#1b6ca8", "#c44536", "#3a7d44")


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        label: the text at the end of the curve.
        run: the run folder.
        metric: the metric that the curve shows.
        times: a factor for the metric's values.
    """

    label: str
    run: str
    metric: str
    times: float = 1.0


TUTORIALS: Mapping[str, tuple[Line, ...]] = {
    "first-run": (
        Line("validation", "runs/demo/run", "val/accuracy"),
        Line("reward", "runs/demo/run", "reward/mean"),
    ),
    "own-reward": (
        Line("right", "runs/brief", "reward/extra/right"),
        Line("characters / 10", "runs/brief", "response_length/mean", 0.1),
    ),
    "own-data": (
        Line("validation", "runs/digits", "val/accuracy"),
        Line("reward", "runs/digits", "reward/mean"),
    ),
    "own-algorithm": (
        Line("GRPO", "runs/grpo", "val/accuracy"),
        Line("above the median", "runs/medianpyabove_median", "val/accuracy"),
    ),
    "reward-model": (Line("score", "runs/films", "reward/mean"),),
    "two-machines": (
        Line("two machines", "runs/machines", "val/accuracy"),
        Line("one process", "runs/demo/run", "val/accuracy"),
    ),
}
"""The curves of each tutorial; `first-run` is the demo."""


def run(name: str, folder: Path) -> None:
    """Follow a tutorial in a folder: write its files and run its commands, in order.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    page = ROOT / "docs" / "tutorials" / f"{name}.md"
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    if not (folder / "examples").exists():
        shutil.copytree(ROOT / "examples", folder / "examples")
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language in ("python", "sh"):
            words = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euc"]
            text = "\n".join(line for line in block.text.splitlines() if not line.startswith("pip install"))
            if "tandem node" in text:
                _on_two_machines(text, folder, environment)
            else:
                subprocess.run([*words, text], cwd=folder, env=environment, check=True, timeout=_WITHIN_S)


def _on_two_machines(text: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a command in each of two network namespaces; this requires root."""
    with cluster_network(2) as machines:
        started = [
            machine.start(
                ["bash", "-euc", text.replace("RANK=0", f"RANK={rank}")], cwd=folder, env=environment
            )
            for rank, machine in enumerate(machines)
        ]
        for process in started:
            if process.wait(timeout=_WITHIN_S):
                raise subprocess.CalledProcessError(process.returncode, text)


def curves(name: str, folder: Path) -> dict[str, list[list[float]]]:
    """Return the points of a tutorial's curves: pairs of step and value."""
    found = {}
    for line in TUTORIALS[name]:
        rows = Run(folder / line.run).metrics
        points = [[row["step"], row[line.metric] * line.times] for row in rows if line.metric in row]
        found[line.label] = [[step, round(value, 4)] for step, value in points]
    return found


def draw(lines: Mapping[str, list[list[float]]]) -> str:
    """Draw curves over steps as SVG that is readable on white and on black."""
    points = [point for line in lines.values() for point in line]
    last, low, high = max(x for x, _ in points), min(0.0, *(y for _, y in points)), max(y for _, y in points)
    high = 1.0 if 0.5 < high <= 1.05 else high
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / last * (right - _LEFT), bottom - (y - low) / (high - low) * (bottom - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        'font-family="sans-serif" font-size="12" fill="#777">',
        f'<path d="M{_LEFT} {_TOP} V{bottom} H{right}" fill="none" stroke="#888"/>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end">{high:.3g}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom + 4}" text-anchor="end">{low:.3g}</text>',
        f'<text x="{right}" y="{bottom + 18}" text-anchor="end">step {last:g}</text>',
    ]
    taken: list[float] = []
    for (label, line), colour in zip(lines.items(), _COLOURS, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        end = at(*line[-1])[1] + 4
        while any(abs(end - other) < 14 for other in taken):
            end += 3
        taken.append(end)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{right + 6}" y="{end:.1f}" fill="{colour}">{escape(label)} {line[-1][1]:.2f}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(folder: str = "build/tutorials", *names: str) -> None:
    where = Path(folder).resolve()
    where.mkdir(parents=True, exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"command": "python -m docs.tutorials"}
    for name in names or TUTORIALS:
        if name != "first-run":
            run(name, where)
        known[name] = curves(name, where)
        FIGURES.mkdir(exist_ok=True)
        (FIGURES / f"{name}.svg").write_text(draw(known[name]), encoding="utf-8")
        RESULTS.write_text(json.dumps(known) + "\n", encoding="utf-8")
        print(f"{name}: " + ", ".join(f"{label} {line[-1][1]:g}" for label, line in known[name].items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
