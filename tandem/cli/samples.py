"""The command `tandem samples`."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli.typed import command
from tandem.errors import ConfigError
from tandem.observability.reading import Run
from tandem.observability.terminal import say

SHOWN = 4
LONGEST = 2000
"""The length in characters above which texts are shown without their middle."""


@command
def samples(
    run: Path,
    step: int | None = None,
    worst: bool = False,
    best: bool = False,
    prompt: str = "",
    n: Annotated[int | None, typer.Option("--n", min=1)] = None,
    val: bool = False,
    full: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print the responses that the policy generated at a step of a run.

    Each sample has its prompt, response, score, the reward's further values and
    reasons, lengths, and why the response ended.

    Args:
        run: the run folder; the run may still be running
        step: the step; default: the last step with samples
        worst: show the lowest scores first
        best: show the highest scores first
        prompt: only prompts that contain this text, or have this uid (the id
            before # in the first line of a sample)
        n: number of samples; default: 4, or all with --json
        val: show the validation after that step
        full: show long texts in full
        as_json: print one JSON object per line
    """
    if worst and best:
        raise ConfigError("these options exclude each other", field="--worst, --best", got="both")
    reader = Run(run)
    rows = reader.samples(step, val=val)
    found = [row for row in rows if not prompt or prompt == row["uid"] or prompt in row["prompt"]]
    if not found:
        raise ConfigError(
            "no prompt of this step contains this text or has this uid",
            field="--prompt",
            got=prompt,
            expected=f"one of {len({row['uid'] for row in rows})} prompts, such as {rows[0]['uid']}: "
            f"{_short(rows[0]['prompt'], 80)}",
        )
    if worst or best:
        found.sort(key=lambda row: row["score"], reverse=best)
    if as_json:
        for row in islice(found, n):
            say(json.dumps(row))
        return
    shown = found[: n or SHOWN]
    for row in shown:
        _show(row, LONGEST if not full else None)
    steps = reader.sample_steps(val=val)
    say(
        f"{len(shown)} of {len(found)} samples of step {shown[0]['step']}, mean score "
        f"{sum(row['score'] for row in found) / len(found):.4g}; steps with samples: {len(steps)}, from "
        f"{steps[0]} to {steps[-1]}"
    )


def _show(row: dict[str, Any], longest: int | None) -> None:
    head = [f"{row['uid']} #{row['sample']}", f"score {row['score']:g}"]
    head += [f"{name} {value:g}" for name, value in row["extra"].items() if name != "score"]
    head += [f"{row['prompt_tokens']} + {row['response_tokens']} tokens", f"ended by {row['finish_reason']}"]
    head += [f"ground truth {row['ground_truth']}"] if row["ground_truth"] is not None else []
    say("── " + " · ".join(_short(part, 120) for part in head))
    why = framed(row["why"], None, mark=" why:") if row["why"] else ""
    say(framed(row["prompt"], longest) + framed(row["response"], longest, mark=" >") + why)


def framed(text: str, longest: int | None, mark: str = " |") -> str:
    """Return the text with a mark before each line, to distinguish it from Tandem's own output."""
    if longest is not None and len(text) > longest:
        left_out = len(text) - longest
        text = f"{text[: longest // 2]}\n[… {left_out:,} characters, see --full …]\n{text[-longest // 2 :]}"
    return "".join(f"{mark} {line}\n" for line in text.split("\n"))


def _short(text: str, longest: int) -> str:
    """Return the text on one line, shortened to at most `longest` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= longest else f"{line[:longest]}…"
