"""The commands `tandem runs`, `tandem runs compare`, `tandem runs plot` and `tandem runs prune`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tandem.cli.pruning import doomed, remove
from tandem.cli.signals import import_module
from tandem.cli.typed import Works, run_typed, run_work
from tandem.errors import ConfigError, TandemError
from tandem.observability.config_file import flat
from tandem.observability.reading import METRICS, Run, find_runs
from tandem.observability.sinks.console import duration
from tandem.observability.terminal import plain_console, printable, say

WIDTH = 200
"""The width of a table, in columns, if the output is not a terminal."""
OF_THE_PLACE = ("trainer.default_local_dir", "trainer.experiment_name")
COMPARED = (
    *METRICS,
    "val/accuracy",
    "val/loss",
    "response_length/mean",
    "response_length/clip_ratio",
    "reward/zero_std_share",
    "actor/entropy",
    "actor/grad_norm",
    "actor/kl",
    "actor/clip_fraction",
    "timing/step",
    "perf/step_tokens_per_s",
)
Folders = Annotated[list[Path] | None, typer.Argument()]


def runs(arguments: list[str]) -> int:
    return run_work("runs", ACTIONS, arguments, partial(run_typed, "runs", _list))


def _list(folders: Folders = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List the runs in a folder.

    The table shows each run's algorithm, model, finished steps, state, reward
    of the first, the last and the best step, time and size. The states are:
    running, finished, interrupted (also if the run was killed), failed, and
    empty (the run did nothing).

    More with --help: tandem runs compare A B … · tandem runs plot A [B …] ·
    tandem runs prune [FOLDER …]

    Args:
        folders: folders to search for runs; default: runs/
        as_json: print one JSON object per line
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("run", "algorithm", "model", "steps", "state", "first → last → best", "time", "size"):
        table.add_column(name, justify="right" if name in ("steps", "time", "size") else "left", no_wrap=True)
    for run in _under(folders):
        facts = _facts(run)
        if as_json:
            say(json.dumps(facts))
            continue
        total = "?" if facts["total_steps"] is None else facts["total_steps"]
        cells = [facts[name] for name in ("run", "algorithm", "model")]
        cells += [f"{facts['steps']}/{total}", facts["state"], _progress(facts)]
        cells += [duration(facts["seconds"]), _size(facts["bytes"])]
        table.add_row(*(printable(str(cell)) for cell in cells))
    if not as_json:
        _print(table)


def _compare(named: list[Path], metric: list[str] | None = None) -> None:
    """Compare the configs and the metrics of runs, side by side.

    Of the configs, only the differences are shown. For each metric the table
    has the first and the last value; for the metric that a run is judged by,
    also the best value.

    Args:
        named: run folders
        metric: an additional metric to show
    """
    compared = [Run(folder) for folder in named]
    settings = [dict(flat(run.config)) for run in compared]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for run in compared:
        table.add_column(printable(str(run.path)), overflow="fold")
    for key in dict.fromkeys(key for own in settings for key in own):
        values = [own.get(key) for own in settings]
        if key not in OF_THE_PLACE and any(value != values[0] for value in values):
            table.add_row(key, *(printable(json.dumps(value)) for value in values))
    table.add_section()
    table.add_row("state", *(run.state for run in compared))
    table.add_row("steps", *(str(run.steps) for run in compared))
    for name in (*COMPARED, *(metric or ())):
        curves = [run.curve(name) for run in compared]
        if any(curves) or name in (metric or ()):
            table.add_row(printable(name), *(_ends(name, curve) for curve in curves))
    _print(table)


def _plot(named: list[Path], metric: str = "") -> None:
    """Draw a metric over the steps of one or more runs.

    Args:
        named: run folders
        metric: its name in metrics.jsonl; default: the metric that the run is
            judged by
    """
    drawn = [Run(folder) for folder in named]
    name = metric or drawn[0].metric or ""
    curves: dict[str, list[tuple[int, float]]] = {}
    for run in drawn:
        curves[str(run.path)] = run.curve(name)
        if not curves[str(run.path)]:
            there = sorted({known for row in run.metrics for known in row})
            near = [known for known in there if known.split("/")[0] == name.split("/")[0]] or there
            raise ConfigError(
                "this run has no finite value of this metric",
                field=str(run.path),
                got=name or None,
                expected=", ".join(near),
            )
    plot = import_module("tandem.observability.plot").plot
    width, height = shutil.get_terminal_size()
    say(plot(curves, name, size=(min(width, 120), max(min(height - 2, 24), 12))))


def _prune(folders: Folders = None, yes: bool = False) -> None:
    """Show what may be deleted, with sizes, and delete it with --yes.

    These are all checkpoints of a run except the newest complete one and the
    best one, and runs that did nothing. Nothing is deleted from a run that is
    running.

    Args:
        folders: folders to search for runs; default: runs/
        yes: delete what is shown
    """
    going = [each for run in _under(folders) for each in doomed(run)]
    for each in going:
        say(f"{_size(each.bytes):>9}  {each.path}  {each.why}")
    total = _size(sum(each.bytes for each in going))
    if not yes:
        count = f"{len(going)} {'folder' if len(going) == 1 else 'folders'}"
        say(f"{count}, {total}; nothing was deleted, add --yes to delete them")
        return
    gone = []
    for each in going:
        try:
            remove(each)
            gone.append(each)
        except TandemError as error:  # the run has started again
            say(f"{each.path} was not deleted: {error}")
    say(f"deleted {len(gone)} folders, {_size(sum(each.bytes for each in gone))}")


ACTIONS: Works = {
    "compare": (_compare, "tandem runs compare runs/a runs/b"),
    "plot": (_plot, "tandem runs plot runs/a runs/b --metric actor/entropy"),
    "prune": (_prune, "tandem runs prune runs --yes"),
}


def _under(folders: Iterable[Path] | None) -> list[Run]:
    wanted = list(folders or [Path("runs")])
    found = {run.path: run for folder in wanted for run in find_runs(folder)}
    if not found:
        raise ConfigError(
            "no run was found", field=", ".join(map(str, wanted)), remedy="name a folder with runs"
        )
    return list(found.values())


def _facts(run: Run) -> dict[str, Any]:
    """Return a run's row of the list, as JSON-like values."""
    facts: dict[str, Any] = {"run": str(run.path), "bytes": run.bytes}
    try:
        curve = run.curve(run.metric) if run.metric else []
        values = [value for _, value in curve]
        best = (min if METRICS.get(run.metric or "") == "min" else max)(values, default=None)
        return {
            **facts,
            "algorithm": _algorithm(run),
            "model": run.written("actor_rollout_ref.model.path") or run.written("model.path") or "?",
            "steps": run.steps,
            "total_steps": run.total_steps,
            "state": run.state,
            "metric": run.metric,
            "first": values[0] if values else None,
            "last": values[-1] if values else None,
            "best": best,
            "seconds": run.seconds,
        }
    except TandemError as error:
        unknown = dict.fromkeys(("algorithm", "model", "steps", "total_steps"), "?")
        return {**facts, **unknown, "state": f"unreadable: {error.message}", "metric": None, "seconds": 0.0}


def _algorithm(run: Run) -> str:
    estimator = run.written("algorithm.adv_estimator")
    if estimator is None:
        return {"rm/accuracy": "rm", "sft/loss": "sft"}.get(run.metric or "", "?")
    loss = run.written("actor_rollout_ref.actor.policy_loss.loss_mode")
    return estimator if loss in (None, "vanilla") else f"{estimator} + {loss}"


def _progress(facts: Mapping[str, Any]) -> str:
    if facts["metric"] is None:
        return ""
    values = " → ".join(f"{facts[name]:.3g}" for name in ("first", "last", "best"))
    return values if facts["metric"] == "reward/mean" else f"{values} ({facts['metric']})"


def _ends(name: str, curve: list[tuple[int, float]]) -> str:
    if not curve:
        return "–"
    (_, first), (_, last) = curve[0], curve[-1]
    if name not in METRICS:
        return f"{first:.4g} → {last:.4g}"
    step, best = (min if METRICS[name] == "min" else max)(curve, key=lambda point: point[1])
    return f"{first:.4g} → {last:.4g}, best {best:.4g} at step {step}"


def _print(table: Table) -> None:
    plain_console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def _size(count: float) -> str:
    """Return a size in a readable unit, such as 7 B or 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
