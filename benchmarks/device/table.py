"""Write the results of all phases as Markdown tables, each row beside its prediction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.device.rates import Rates
from benchmarks.device.report import Report, Row

PREDICTIONS = Path(__file__).with_name("predictions.json")
HEADER = ("row", "measured", "share of the bound", "predicted share", "predicted", "more")


def predictions() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the predictions by phase and row.

    A prediction has the "share" of the bound, or a "value" if there is no bound, or a text in "says" if no
    value is expected. "because" has the reason.
    """
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(PREDICTIONS.read_text())
    return found


def predict(row: Row, told: dict[str, Any] | None, rates: Rates) -> dict[str, Any]:
    """Return the predicted share and value of a row at these rates; empty without a prediction."""
    if told is None:
        return {}
    share = told.get("share")
    value = told.get("value") if share is None else row.at_share(share, rates)
    return {"share": share, "value": value, "says": told.get("says")}


def markdown(reports: Iterable[tuple[str, Report]]) -> str:
    """Return the tables of the phases, one after the other."""
    return "\n".join(line for phase, report in reports for line in phase_lines(phase, report)) + "\n"


def phase_lines(phase: str, report: Report) -> list[str]:
    about = report.about
    lines = [f"## {phase}", "", heading(about), ""]
    lines += [f"{text}\n" for text in about.get("notes", ())]
    lines += [bar(HEADER), bar(["---"] * len(HEADER))]
    lines += [bar(cells(row)) for row in report.rows]
    lines.append("")
    for row in report.rows:
        lines += details(row)
    return lines


def heading(about: dict[str, Any]) -> str:
    """Return the device, its rates at the start and at the end, and the versions."""
    machine, versions = about.get("machine", {}), about.get("machine", {}).get("versions", {})
    named = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    text = f"{machine.get('device', '?')}; {named}."
    if "rates" in about:
        text += f" Rates at the start: {rates_text(about['rates'])}."
    if "rates_at_end" in about:
        text += f" Rates at the end: {rates_text(about['rates_at_end'])}."
    return text


def rates_text(rates: dict[str, float]) -> str:
    return (
        f"copy {rates['copy'] / 1e12:.2f} TB/s, product {rates['product'] / 1e12:,.3g} TFLOP/s, "
        f"to the host {rates['to_host'] / 1e9:.1f} GB/s, from it {rates['from_host'] / 1e9:.1f}"
    )


def cells(row: dict[str, Any]) -> list[str]:
    predicted = row.get("predicted", {})
    unit = row.get("unit", "")
    if "value" in row:
        measured = f"{number(row['value'])} {unit}"
    else:
        measured = "error" if "error" in row else f"skipped: {row.get('skipped')}"
    return [
        row["name"],
        measured,
        percent(row.get("share")),
        percent(predicted.get("share")),
        expected(predicted, unit),
        more(row),
    ]


def expected(predicted: dict[str, Any], unit: str) -> str:
    if predicted.get("value") is not None:
        return f"{number(predicted['value'])} {unit}"
    return predicted.get("says") or ""


def more(row: dict[str, Any]) -> str:
    """Return further numbers of a row that readers of the table look for."""
    parts = []
    if "error" in row:
        parts.append(row["message"].replace("|", "/"))
    for name, text in (
        ("step_ms", "step {:.2f} ms"),
        ("eager_ms", "eager {:.2f} ms"),
        ("attention_ms", "attention {:.2f} ms"),
        ("sample_ms", "draw {:.2f} ms"),
        ("step_s", "step {:.2f} s"),
        ("first_s", "first {:.1f} s"),
        ("peak_gib", "peak {:.1f} GiB"),
        ("captures", "captures {}"),
        ("times_verl", "{:.2f} times verl"),
        ("device_ms", "device {:.2f} ms"),
        ("accuracy_after", "accuracy {:.3f}"),
        ("failed", "{} failed"),
        ("skipped", "{} skipped"),
    ):
        if "value" in row and row.get(name) is not None:
            parts.append(text.format(row[name]))
    parts += [sentence.partition(" (")[0] for sentence in row.get("said", ())]
    if "formula_gib" in row:
        parts.append(
            "predicted " + ", ".join(f"{name} {gib:.1f}" for name, gib in row["formula_gib"].items())
        )
    return "; ".join(parts)


def details(row: dict[str, Any]) -> list[str]:
    """Return what goes below a table: the kernels of a profile, and the tests that failed."""
    lines: list[str] = []
    if "kernels" in row:
        lines += [
            f"{row['name']}, ms per step:",
            "",
            bar(["ms", "share", "calls", "kernel"]),
            bar(["---"] * 4),
        ]
        for kernel in row["kernels"]:
            name = kernel["name"].replace("|", "/")
            lines.append(
                bar([f"{kernel['ms']:.3f}", percent(kernel["share"]), f"{kernel['calls']:.0f}", f"`{name}`"])
            )
        lines.append("")
    for failure in row.get("failures", ()):
        lines += [f"failed: {failure['name']}", "", "```", failure["text"].strip(), "```", ""]
    return lines


def bar(parts: Sequence[str]) -> str:
    return f"| {' | '.join(parts)} |"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
