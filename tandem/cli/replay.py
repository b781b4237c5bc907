"""The command `tandem replay`."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.signals import import_module
from tandem.cli.typed import command
from tandem.errors import DataError
from tandem.observability.reading import Run
from tandem.observability.terminal import say


@command
def replay(
    run: Path,
    changes: Annotated[list[str] | None, typer.Argument(metavar="key=value")] = None,
    step: Annotated[int | None, typer.Option(min=1)] = None,
    reward: Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION")] = None,
    without: Annotated[str, typer.Option(metavar="UID,…")] = "",
    attribute: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Repeat a step of a run and compare the result with what was recorded.

    The replay starts from the checkpoint before the step, and uses the samples
    that the run stored. On a CPU the results are equal, bit for bit. If you
    give changes, the replay also shows the step with these changes. The exit
    status is 1 if the replay differs from the record.

    Args:
        run: the run folder, which is only read
        changes: changed config keys for a second replay; only keys that affect
            training on given samples
        step: the step to repeat; default: the last finished step
        reward: reward function that replaces the recorded scores
        without: leave out the samples of prompts (UID), or single samples
            (UID#SAMPLE)
        attribute: show which samples and tokens the gradient comes from
        as_json: print one JSON object
    """
    reader = Run(run)
    number = reader.steps if step is None else step
    report = import_module("tandem.trainer.replay_report")
    with redirect_stdout(sys.stderr):  # the output of workers
        left_out = tuple(filter(None, without.split(",")))
        told = report.replay_found(reader, number, changes or (), reward, left_out, attribute=attribute)
    if as_json:
        say(json.dumps(report.without_nan(told), allow_nan=False))
    else:
        say(report.text(told, report.decoder(reader)))
    if not told["equal"]:
        raise DataError(
            "the replay differs from what was recorded",
            field=f"step {number}",
            got=f"{sum(not row['equal'] for row in told['metrics'])} metrics differ",
            expected="the same values, bit for bit, on a CPU of the same kind with the same versions, "
            "ranks and threads",
            remedy="a small difference is rounding on another machine or with other versions; a large one "
            "means that the model or a file of the run has changed",
        )
