"""`tandem replay RUN --step N [--reward FILE:NAME] [--without UID,…] [--attribute] [--json] [key=value …]`"""

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
    """Takes a step of a run again, from the checkpoint before it and the samples that the run kept, and
    shows what it gives beside what was recorded; on a CPU they are the same, bit for bit. With changes it
    shows what the step would have been, too. Exit status 1 where the replay differs.

    Args:
        run: the run folder, which is only read
        changes: keys of what is learnt from given samples, for a changed step beside it
        step: the step; the last one done
        reward: a reward in place of the recorded scores
        without: leave out prompts' samples, or single ones, uid#sample
        attribute: which samples and tokens the gradient is made of
        as_json: one JSON object, for programs
    """
    reader = Run(run)
    number = reader.steps if step is None else step
    report = import_module("tandem.trainer.replay_report")
    with redirect_stdout(sys.stderr):  # what workers say
        left_out = tuple(filter(None, without.split(",")))
        told = report.replay_found(reader, number, changes or (), reward, left_out, attribute=attribute)
    if as_json:
        say(json.dumps(report.without_nan(told), allow_nan=False))
    else:
        say(report.text(told, report.decoder(reader)))
    if not told["equal"]:
        raise DataError(
            "the replay is not what was recorded",
            field=f"step {number}",
            got=f"{sum(not row['equal'] for row in told['metrics'])} metrics differ",
            expected="the same, bit for bit, on a CPU of its kind with its versions, ranks and threads",
            remedy="a small difference is another machine's or version's rounding; a large one means that "
            "the model or a file of the run is not the one that it was",
        )
