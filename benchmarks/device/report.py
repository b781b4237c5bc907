"""The rows of a phase: what measures each, the bound it is a share of, and the file of what was found.

The file is written anew after every row, beside and then renamed: a phase that is killed leaves what it had.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.rates import Rates, measure_rates

LOST = 3
"""The exit status of a process whose device no longer answers."""


@dataclass(frozen=True)
class Setting:
    """Where a phase runs.

    Attributes:
        device: of the models.
        tiny: whether the smallest shapes are meant, to try the program itself.
        rates: of the device, measured at the phase's start.
        folder: for files that are not kept, shared by the phases.
        until: `time.monotonic()` at which the phase ends.
    """

    device: torch.device
    tiny: bool
    rates: Rates
    folder: Path
    until: float

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    @property
    def forks(self) -> bool:
        """Whether processes of a row may be forks of this one."""
        return self.tiny and self.device.type == "cpu"


class Skipped(Exception):
    """A row that cannot be measured here; its text says why."""


Bound = Callable[[Rates], float]


@dataclass(frozen=True)
class Row:
    """One thing to measure.

    Attributes:
        name: within its phase; predictions are found by it.
        work: measures it: "value", in `unit`, and whatever else there is to tell.
        expects_s: how long that takes; it is left out when less time is left.
        unit: a rate, or "s", of which less is better.
        bound: the value at the whole of the measured rates; None where there is no such thing.
    """

    name: str
    work: Callable[[Setting], dict[str, Any]]
    expects_s: float
    unit: str = "tokens/s"
    bound: Bound | None = None

    def share(self, value: float, rates: Rates) -> float | None:
        """How near a value comes to the bound; 1 is at it."""
        if self.bound is None or not value:
            return None
        bound = self.bound(rates)
        return bound / value if self.unit == "s" else value / bound

    def at_share(self, share: float, rates: Rates) -> float | None:
        """The value that is this share of the bound."""
        if self.bound is None:
            return None
        return self.bound(rates) / share if self.unit == "s" else self.bound(rates) * share


@dataclass
class Report:
    """What a phase has found, in its file.

    Attributes:
        about: of the phase as a whole: command, device, versions, rates.
        rows: as measured, in order; each has a "value", an "error", or why it was "skipped".
        running: the row at hand; of a process that died, the one it died of.
        predicted: by row, what was predicted for it; stands with the rows as they come.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    running: str | None = None
    predicted: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> Report:
        """The report in a file; an empty one where there is none."""
        if not path.exists():
            return cls(path)
        held = json.loads(path.read_text())
        return cls(path, held["about"], held["rows"], held["running"])

    def write(self) -> None:
        whole = {"about": self.about, "running": self.running, "rows": self.rows}
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(whole, indent=1, default=str) + "\n")
        os.replace(beside, self.path)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row | {"predicted": self.predicted.get(row["name"], {})})
        self.running = None
        self.write()
        print(line(row), flush=True)

    @property
    def done(self) -> set[str]:
        return {row["name"] for row in self.rows}


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    if "value" not in row:
        why = f"error: {row['message']}" if "error" in row else f"skipped: {row['skipped']}"
        return f"  {row['name']}: {why}"
    share = "" if row.get("share") is None else f", {row['share']:.0%} of the bound"
    return f"  {row['name']}: {row['value']:,.4g} {row['unit']}{share} ({row['took_s']:.0f} s)"


def measure(rows: Sequence[Row], setting: Setting, report: Report) -> None:
    """Measures the rows that the report does not have yet, for as long as there is time.

    Raises:
        SystemExit: with status `LOST`, where the device no longer answers; the row at hand has its error.
    """
    for row in rows:
        if row.name in report.done:
            continue
        if setting.left_s < row.expects_s:
            why = f"{setting.left_s:.0f} s are left, and it takes {row.expects_s:.0f}"
            report.add({"name": row.name, "skipped": why})
            continue
        report.running = row.name
        report.write()
        report.add(found(row, setting))
        free_memory(setting.device)
        if not answers(setting.device):
            raise SystemExit(LOST)
    report.about["rates_at_end"] = measure_rates(setting.device, tiny=setting.tiny).__dict__
    report.about["finished"] = True
    report.write()


def found(row: Row, setting: Setting) -> dict[str, Any]:
    """What measuring a row gave: its value, or the error's text."""
    began = time.monotonic()
    told: dict[str, Any] = {"name": row.name, "unit": row.unit}
    try:
        told |= row.work(setting)
    except Skipped as reason:
        return {"name": row.name, "skipped": str(reason)}
    except Exception as error:  # whatever it is, it is this row's, and the next one goes on
        told["error"] = short(traceback.format_exc())
        told["message"] = f"{type(error).__name__}: {first_line(str(error))}"
        told.pop("value", None)
    told["took_s"] = time.monotonic() - began
    if "value" in told:
        told["share"] = row.share(told["value"], setting.rates)
    return told


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def short(text: str, characters: int = 3000) -> str:
    """The end of a long text."""
    return text if len(text) <= characters else f"[…]{text[-characters:]}"


def free_memory(device: torch.device) -> None:
    """Gives back what no row holds, and begins to count peaks anew."""
    gc.collect()
    if device.type == "cuda" and answers(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def answers(device: torch.device) -> bool:
    """Whether the device still computes: after an illegal access it does not, in this process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
