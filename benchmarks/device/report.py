"""The rows of a phase and the file of their results.

A row has a function that measures it and a bound. The file is rewritten after every row: a temporary file is
written and then renamed. So a phase that is killed keeps its earlier results.
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
    """The conditions of a phase.

    Attributes:
        device: the device of the models.
        tiny: use the smallest shapes, to try the program itself.
        rates: the rates of the device, measured at the start of the phase.
        folder: a folder for temporary files, shared by the phases.
        until: the value of `time.monotonic()` at which the phase ends.
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
        """Whether a row may fork the current process."""
        return self.tiny and self.device.type == "cpu"


class Skipped(Exception):
    """Raised by a row that cannot be measured here; the text says why."""


Bound = Callable[[Rates], float]


@dataclass(frozen=True)
class Row:
    """One thing to measure.

    Attributes:
        name: the name within the phase, which selects the prediction.
        work: the function that measures; its result has "value" in `unit`, and further facts.
        expects_s: expected seconds; the row is skipped if less time is left.
        unit: a rate, or "s", where less is better.
        bound: the value at the measured rates of the device; None if there is no bound.
    """

    name: str
    work: Callable[[Setting], dict[str, Any]]
    expects_s: float
    unit: str = "tokens/s"
    bound: Bound | None = None

    def share(self, value: float, rates: Rates) -> float | None:
        """Return how near a value is to the bound; 1 means equal."""
        if self.bound is None or not value:
            return None
        bound = self.bound(rates)
        return bound / value if self.unit == "s" else value / bound

    def at_share(self, share: float, rates: Rates) -> float | None:
        """Return the value at this share of the bound."""
        if self.bound is None:
            return None
        return self.bound(rates) / share if self.unit == "s" else self.bound(rates) * share


@dataclass
class Report:
    """The results of a phase and their file.

    Attributes:
        path: the file.
        about: facts about the whole phase: command, device, versions, rates.
        rows: the measured rows in order; each has a "value", an "error", or a "skipped" with the reason.
        running: the current row; after the process died, the row in which it died.
        predicted: the prediction of each row by name; it is stored with the row.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    running: str | None = None
    predicted: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> Report:
        """Read the report in a file; return an empty report if the file does not exist."""
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
    """Return a row as a line of text."""
    if "value" not in row:
        why = f"error: {row['message']}" if "error" in row else f"skipped: {row['skipped']}"
        return f"  {row['name']}: {why}"
    share = "" if row.get("share") is None else f", {row['share']:.0%} of the bound"
    return f"  {row['name']}: {row['value']:,.4g} {row['unit']}{share} ({row['took_s']:.0f} s)"


def measure(rows: Sequence[Row], setting: Setting, report: Report) -> None:
    """Measure the rows that the report does not have yet, as long as there is time.

    Raises:
        SystemExit: with status `LOST` if the device no longer answers; the current row has its error.
    """
    for row in rows:
        if row.name in report.done:
            continue
        if setting.left_s < row.expects_s:
            why = f"only {setting.left_s:.0f} s left, but the row needs {row.expects_s:.0f} s"
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
    """Measure a row; return its value or the text of its error."""
    began = time.monotonic()
    told: dict[str, Any] = {"name": row.name, "unit": row.unit}
    try:
        told |= row.work(setting)
    except Skipped as reason:
        return {"name": row.name, "skipped": str(reason)}
    except Exception as error:  # any error belongs to this row, and the next row continues
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
    """Return the end of a long text."""
    return text if len(text) <= characters else f"[…]{text[-characters:]}"


def free_memory(device: torch.device) -> None:
    """Free unused memory and reset the peak counter."""
    gc.collect()
    if device.type == "cuda" and answers(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def answers(device: torch.device) -> bool:
    """Return whether the device still computes; after an illegal access it does not, in this process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
