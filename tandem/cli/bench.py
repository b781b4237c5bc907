"""`tandem bench [CONFIG.yaml] key=value …`, `tandem bench compare A.json B.json`, `tandem bench predict …`"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.bench.asked import Asked
from tandem.bench.prediction import predicted, told
from tandem.cli.signals import import_module
from tandem.cli.typed import Works, run_typed, run_work
from tandem.errors import DataError
from tandem.lifetime import scratch_folder
from tandem.memory.device_file import default_path
from tandem.observability.terminal import say, warn
from tandem.texts import parse_json

Words = Annotated[list[str] | None, typer.Argument()]


def bench(arguments: list[str]) -> int:
    return run_work("bench", ACTIONS, arguments, partial(run_typed, "bench", _bench))


def _bench(
    words: Words = None,
    dummy: bool = False,
    lengths: str = "",
    prompt_lengths: str = "",
    steps: Annotated[int, typer.Option(min=1)] = 5,
    warm_up: Annotated[int, typer.Option(min=0)] = 1,
    save: Annotated[bool, typer.Option()] = True,
    folder: Path | None = None,
    out: Path | None = None,
    device_file: Path | None = None,
) -> None:
    """Measures the phases of real training steps: the run that the config describes, with prompts of random
    tokens, responses of given lengths and a reward of chance. Prints each phase beside its floor on this
    device, and beside what the users' benchmark document says of the same model. What it found also teaches
    `tandem bench predict`.

    More with --help: tandem bench compare A.json B.json · tandem bench predict [CONFIG.yaml] key=value …

    Args:
        words: [CONFIG.yaml] key=value …, as of tandem train
        dummy: random weights, for a config.json, a folder with one, or a name
        lengths: of responses, tokens: N, uniform:LOW:HIGH, lognormal:MEAN:P95 (P95 below 3.8 × MEAN),
            run:FOLDER; the greatest
        prompt_lengths: of prompts, tokens: N, uniform:LOW:HIGH, lognormal:MEAN:P95 (P95 below 3.8 × MEAN),
            run:FOLDER; the greatest
        steps: that are measured
        warm_up: steps before them
        save: write a checkpoint after the last step
        folder: for what it makes; a temporary one. Workers elsewhere must see it
        out: the report as JSON
        device_file: where factors are kept; ~/.cache/tandem/device.json
    """
    measure, report = import_module("tandem.bench.measure"), import_module("tandem.bench.report")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder("bench") as temporary:
        asked = Asked(
            tuple(words or ()),
            dummy=dummy,
            prompts=prompt_lengths,
            responses=lengths,
            steps=steps,
            warm_up=warm_up,
            saves=save,
            folder=folder or temporary,
        )
        found = measure.measure(asked, warn)
    say(report.markdown(found))
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    report.learn(found, device_file or default_path())


def _compare(a: Path, b: Path) -> None:
    """Shows two reports side by side, with the ratio of each row, and what differs between their configs,
    machines and versions."""
    say(import_module("tandem.bench.report").compared(_read(a), _read(b)))


def _predict(
    words: Words = None,
    lengths: str = "",
    prompt_lengths: str = "",
    device: str = "",
    device_file: Path | None = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Says what a step and a run of a config take on a device that `tandem bench` has measured; nothing is
    run.

    Args:
        words: [CONFIG.yaml] key=value …, as of tandem train
        lengths: of responses, tokens: N, uniform:LOW:HIGH, lognormal:MEAN:P95 (P95 below 3.8 × MEAN),
            run:FOLDER; the greatest
        prompt_lengths: of prompts, tokens: N, uniform:LOW:HIGH, lognormal:MEAN:P95 (P95 below 3.8 × MEAN),
            run:FOLDER; the greatest
        device: its name in the file; the one that is there alone
        device_file: where factors are kept; ~/.cache/tandem/device.json
        as_json: as JSON
    """
    found = predicted(words or (), prompt_lengths, lengths, device_file or default_path(), device)
    say(json.dumps(found) if as_json else told(found))


ACTIONS: Works = {
    "compare": (_compare, "tandem bench compare before.json after.json"),
    "predict": (_predict, "tandem bench predict config.yaml trainer.total_training_steps=500 --lengths 900"),
}


def _read(path: Path) -> dict[str, Any]:
    """
    Raises:
        DataError: no report there.
    """
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        if not {"rows", "machine", "versions", "config", "lengths"} <= set(found):
            raise ValueError("its keys are others")
    except (OSError, ValueError, TypeError) as error:
        raise DataError("is no report of tandem bench", field=str(path), got=error) from error
    return dict(found)
