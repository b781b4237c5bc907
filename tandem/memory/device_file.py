"""The file with the speeds of measured devices: `~/.cache/tandem/device.json`.

If `$XDG_CACHE_HOME` is set, the file is in that folder. `tandem bench` writes it. `tandem bench predict` and
`tandem plan` read it.

    {"format": 1, "devices": {"NAME, TYPE": {
        "rates": {"operations": per second, "bytes": per second}, "item": bytes per element, "observations":
        [{"run": what was measured, "phases": {PHASE: {"work": [5 numbers], "seconds": s}}}], "factors":
        {PHASE: [5 numbers]}}}}

`tandem.memory.seconds` explains the numbers: work is operations, bytes, calls, tokens and samples. If a run
is measured again, the new observation replaces the old one. Then the factors are fitted to all observations
again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from tandem.errors import DataError
from tandem.memory.seconds import Factors, Rates, Work, fit
from tandem.texts import parse_json

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Device:
    """The measured speeds of a type of device.

    Attributes:
        rates: the highest measured speeds.
        item: bytes per element in the dtype of the computation.
        factors: the factors of the phases of a step; see `tandem.memory.seconds.Factors`.
    """

    rates: Rates
    item: int
    factors: Factors


def default_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem" / "device.json"


def read_devices(path: Path) -> dict[str, Device]:
    """Return a dict from name to device, as read from the file; empty if there is no file.

    Raises:
        DataError: the file has another format.
    """
    try:
        return {
            name: Device(Rates(**each["rates"]), each["item"], each["factors"])
            for name, each in _stored(path)["devices"].items()
        }
    except (KeyError, TypeError) as error:
        raise _foreign(path, error) from error


def add_observation(
    path: Path, name: str, rates: Rates, item: int, run: str, phases: Mapping[str, tuple[Work, float]]
) -> Device:
    """Add a measured run to the file, and fit the device's factors again.

    Args:
        path: the file.
        name: the name of the device and of the dtype of the computation.
        rates: see `Device`.
        item: see `Device`.
        run: a text that identifies the run.
        phases: a dict from phase to its work and its measured seconds.

    Raises:
        DataError: the file has another format.
    """
    stored = _stored(path)
    device = stored["devices"].setdefault(name, {"observations": []})
    kept = [each for each in device["observations"] if each["run"] != run]
    found = {phase: {"work": astuple(work), "seconds": seconds} for phase, (work, seconds) in phases.items()}
    device["observations"] = [*kept, {"run": run, "phases": found}]
    device |= {"rates": asdict(rates), "item": item}
    device["factors"] = {
        phase: fit(
            [_pair(each["phases"][phase]) for each in device["observations"] if phase in each["phases"]],
            rates,
        )
        for phase in dict.fromkeys(phase for each in device["observations"] for phase in each["phases"])
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
    return Device(rates, item, device["factors"])


def _pair(stored: Mapping[str, Any]) -> tuple[Work, float]:
    return Work(*stored["work"]), stored["seconds"]


def _stored(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"format": FORMAT, "devices": {}}
    try:
        found: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT or not isinstance(found["devices"], dict):
            raise ValueError(f"format {found['format']}")
    except (ValueError, KeyError, TypeError) as error:
        raise _foreign(path, error) from error
    return found


def _foreign(path: Path, error: Exception) -> DataError:
    return DataError(
        "this is not a file of measured devices",
        field=str(path),
        got=f"{type(error).__name__}: {error}",
        remedy="remove it; `tandem bench` writes a new one",
    )
