"""Format a benchmark's report as markdown, compare two reports, and update the device file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.bench.documents import NOTES, published
from tandem.memory.device_file import Device, add_observation
from tandem.memory.seconds import Rates, Work
from tandem.observability.reading import PHASES

RATES = {
    "gen": ("gen throughput", "response", "rollout devices"),
    "old_log_prob": ("prev logprob throughput", "total", "actor devices"),
    "update_actor": ("training throughput", "total", "actor devices"),
    "step": ("step throughput", "total", "devices"),
}
"""For each phase: the name of its rate, the tokens that count, and the devices."""


def throughput(report: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return tokens per second, per device and in total, with the names of `RATES`.

    The rate `gen` counts generated tokens. All other rates count prompt and response tokens. In training, the
    tokens count once per pass (epoch).
    """
    rows, machine, passes = report["rows"], report["machine"], report["passes"]
    out = {}
    for phase, (name, counted, devices) in RATES.items():
        if phase in rows:
            tokens = report["lengths"][counted] * (passes if phase == "update_actor" else 1)
            whole = tokens / rows[phase]["median"]
            out[name] = (whole / machine[devices], whole)
    return out


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a table of phases, a table of rates, and a description of the machine."""
    theirs = published(report["model"])
    rows, machine = report["rows"], report["machine"]
    head = ["phase", "median", "least to most", "floor", "share of floor", *(each.system for each in theirs)]
    lines = [*_row(head), "|" + "---|" * len(head)]
    for phase in PHASES:
        if phase in rows:
            row = rows[phase]
            floor = (_number(row["floor"]), f"{row['share']:.2f}") if "floor" in row else ("", "")
            beside = (_number(each.rows[phase]) if phase in each.rows else "" for each in theirs)
            spread = f"{_number(row['least'])} to {_number(row['most'])}"
            lines += _row([phase, _number(row["median"]), spread, *floor, *beside])
    lines += ["", *_row(["tokens per second", "per device", "in total", *(each.system for each in theirs)])]
    lines += ["|" + "---|" * (3 + len(theirs))]
    for name, (each_device, whole) in throughput(report).items():
        printed = (f"{each.throughput[name]:,.0f}" if name in each.throughput else "" for each in theirs)
        lines += _row([name, f"{each_device:,.0f}", f"{whole:,.0f}", *printed])
    rates, lengths = report["rates"], report["lengths"]
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    lines += [
        "",
        f"Seconds; response_length in tokens. Medians of {report['steps']} steps after "
        f"{report['warm-up']} warm-up steps. A step has {lengths['total']:,} tokens, "
        f"{lengths['response']:,} of them generated.",
        "",
        f"{machine['devices']} × {machine['device']}; {machine['host']}; load {machine['load before']} "
        f"before, {machine['load after']} after; {versions}. The floor assumes "
        f"{rates['operations'] / 1e12:.4g} TFLOP/s and {rates['bytes'] / 1e9:.4g} GB/s, as measured in this "
        "run.",
        "",
        f"`{report['command']}`",
    ]
    if theirs:
        lines += ["", NOTES]
        lines += [
            f"{each.system}: {', '.join(f'{k} {v}' for k, v in each.parameters.items())}." for each in theirs
        ]
    return "\n".join(lines)


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Return two reports side by side, with the ratio of the first to the second.

    A second table lists what differs between configs, machines and versions.
    """
    lines = [*_row(["phase", "A", "B", "A / B"]), "|---|---|---|---|"]
    for phase in PHASES:
        values = [report["rows"].get(phase, {}).get("median") for report in (first, second)]
        if any(value is not None for value in values):
            both = all(values)
            ratio = f"{values[0] / values[1]:.2f}" if both else ""
            lines += _row([phase, *("" if value is None else _number(value) for value in values), ratio])
    rates = throughput(first), throughput(second)
    for name, *_ in RATES.values():
        if all(name in each for each in rates):
            one, other = (each[name][0] for each in rates)
            lines += _row([f"{name}, per device", f"{one:,.0f}", f"{other:,.0f}", f"{one / other:.2f}"])
    lines += ["", *_row(["differs", "A", "B"]), "|---|---|---|"]
    for name, a, b in _differing(first, second):
        lines += _row([name, a, b])
    return "\n".join(lines)


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for part in ("config", "lengths", "model", "machine", "versions"):
        for name in dict.fromkeys((*first[part], *second[part])):
            a, b = first[part].get(name), second[part].get(name)
            if a != b:
                yield name if part != "model" else f"model's {name}", str(a), str(b)


def learn(report: Mapping[str, Any], path: Path) -> Device:
    """Add a report to the device file, and return the updated device."""
    work = {phase: Work(**each) for phase, each in report["work"].items()}
    parts = report["parts"]
    name = report["machine"]["device"]
    run = f"{report['config']} {report['lengths']} {report['model']}"
    observed = {phase: (work[phase], parts[phase]) for phase in work if parts.get(phase, 0) > 0}
    item = report["machine"]["bytes of a number"]
    return add_observation(path, name, Rates(**report["rates"]), item, run, observed)


def _row(cells: list[str]) -> list[str]:
    return [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"]


def _number(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:.4g}"
