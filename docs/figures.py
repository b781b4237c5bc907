"""Read the figures on pages that come from result files.

    1.74 <!-- = grpo_step_vs_trl.json rows[mode=equal,precision=fp32].ratio -->

The comment after a figure names a file of benchmarks/results and a path in that file. Square brackets select
the member of a list that has the given values. Two paths may be divided with `/`. A test checks that the
figure equals the value, to the digits shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from docs.entries import ROOT

RESULTS = ROOT / "benchmarks" / "results"
_FIGURE = re.compile(r"([\d.,]+)\s?(%|MB|GB|MiB|s|ms)?\s*<!-- = (\S+) (.+?) -->")
_STEP = re.compile(r"(\w+)(?:\[([^\]]*)\])?(?:\.|$)")
_UNIT = {"%": 0.01, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "ms": 1e-3}


@dataclass(frozen=True)
class Figure:
    """A figure on a page.

    Attributes:
        shown: the digits on the page, without the unit.
        unit: the unit on the page, as a number of the file's units.
        file, path: the result file and the path of the value in that file.
    """

    shown: str
    unit: float
    file: str
    path: str

    @property
    def value(self) -> float:
        """The value in the file, converted to the unit of the page."""
        numerator, _, denominator = self.path.partition(" / ")
        value = _at(self.file, numerator) / (_at(self.file, denominator) if denominator else 1.0)
        return value / self.unit

    @property
    def is_right(self) -> bool:
        shown = self.shown.rstrip(".,").replace(",", "")
        digits = len(shown.partition(".")[2])
        return abs(float(shown) - self.value) <= 0.5000001 * 10.0**-digits


def figures(text: str) -> Iterator[Figure]:
    """Yield the figures of a page."""
    for shown, unit, file, path in _FIGURE.findall(text):
        yield Figure(shown, _UNIT.get(unit, 1.0), file, path)


@cache
def _loaded(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _at(file: str, path: str) -> float:
    """Return the number at a path of a result file.

    Raises:
        KeyError: the path matches no entry or several entries.
    """
    value = _loaded(RESULTS / file)
    for name, wanted in _STEP.findall(path.strip()):
        value = value[name]
        if wanted:
            pairs = [part.split("=") for part in wanted.split(",")]
            found = [each for each in value if all(str(each.get(key)) == want for key, want in pairs)]
            if len(found) != 1:
                raise KeyError(f"{file}: {len(found)} entries match {path}, but exactly one must match")
            value = found[0]
    return float(value)
