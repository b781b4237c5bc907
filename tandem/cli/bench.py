"""The commands `tandem bench`, `tandem bench compare` and `tandem bench predict`."""

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
    """Measure the phases of real training steps.

    The run is the one that the config describes, with three changes: prompts
    are random tokens, responses have the lengths that you give, and rewards are
    random. The report shows the time of each phase next to the least time that
    this device could need (its floor). If the document «Compare with Verl» has
    figures for the same model, they are shown, too. The results also calibrate
    `tandem bench predict`.

    More with --help: tandem bench compare A.json B.json · tandem bench predict
    [CONFIG.yaml] key=value …

    Args:
        words: [CONFIG.yaml] key=value …, the same as for tandem train
        dummy: use random weights; the model may then be a config.json, a folder
            with one, or a name such as Qwen/Qwen2.5-7B
        lengths: response lengths in tokens: N, uniform:LOW:HIGH,
            lognormal:MEAN:P95 (P95 below 3.8 × MEAN) or run:FOLDER; default:
            the longest that the config allows
        prompt_lengths: prompt lengths in tokens, in the same forms as --lengths
        steps: number of measured steps
        warm_up: number of steps before the measured ones
        save: write a checkpoint after the last step
        folder: folder for prompts, models and the run; workers on other
            machines must see it. Default: a temporary folder
        out: write the report to this file, as JSON
        device_file: file with the calibration of measured devices; default:
            ~/.cache/tandem/device.json
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
    """Show two reports of tandem bench side by side.

    The table has the ratio of each row, and lists what differs between the
    configs, machines and versions.

    Args:
        a: the first report, a JSON file
        b: the second report
    """
    say(import_module("tandem.bench.report").compared(_read(a), _read(b)))


def _predict(
    words: Words = None,
    lengths: str = "",
    prompt_lengths: str = "",
    device: str = "",
    device_file: Path | None = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Predict the time of a step and of a whole run.

    The device must have been measured with `tandem bench`. Nothing is run.

    Args:
        words: [CONFIG.yaml] key=value …, the same as for tandem train
        lengths: response lengths in tokens: N, uniform:LOW:HIGH,
            lognormal:MEAN:P95 (P95 below 3.8 × MEAN) or run:FOLDER; default:
            the longest that the config allows
        prompt_lengths: prompt lengths in tokens, in the same forms as --lengths
        device: name of the device in the device file; not needed if the file
            has only one
        device_file: file with the calibration of measured devices; default:
            ~/.cache/tandem/device.json
        as_json: print JSON
    """
    found = predicted(words or (), prompt_lengths, lengths, device_file or default_path(), device)
    say(json.dumps(found) if as_json else told(found))


ACTIONS: Works = {
    "compare": (_compare, "tandem bench compare before.json after.json"),
    "predict": (_predict, "tandem bench predict config.yaml trainer.total_training_steps=500 --lengths 900"),
}


def _read(path: Path) -> dict[str, Any]:
    """Return a report that `tandem bench` wrote.

    Raises:
        DataError: the file is not such a report.
    """
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        if not {"rows", "machine", "versions", "config", "lengths"} <= set(found):
            raise ValueError("it has other keys")
    except (OSError, ValueError, TypeError) as error:
        raise DataError("is not a report of tandem bench", field=str(path), got=error) from error
    return dict(found)
