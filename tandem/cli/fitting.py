"""What `tandem plan` says of time, and its search for a config that fits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tandem.cli.probing import Probing
from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.config.schema import value_at
from tandem.config.sources import read_sources
from tandem.data.files import count_rows
from tandem.errors import ConfigError, ConfigErrors, TandemError
from tandem.memory.fit import search
from tandem.memory.levers import with_value
from tandem.memory.plan import GIB, Plan
from tandem.memory.schedules import Schedule, chosen
from tandem.memory.seconds import Lengths, forecast
from tandem.memory.shapes import shape_of
from tandem.memory.timing import Clock, Judge
from tandem.observability.terminal import say


def judge_of(
    path: str | None, overrides: Sequence[str], device: float, clock: Clock | None, lengths: Lengths
) -> Judge:
    """What says how good a config is.

    Args:
        path, overrides: what it was loaded from.
        device: bytes of one.
        clock: None: of a CPU that was not measured.
        lengths: of a step's sequences.
    """

    def accepts(keys: Mapping[str, Any]) -> bool:
        try:
            load_train_config(path, [*overrides, *as_words(keys)], elsewhere=True)
        except ConfigErrors:
            return False
        return True

    return Judge(device, shape_of, clock, lengths, accepts)


def time_of(config: TrainConfig, made: Plan, judge: Judge, probing: Probing | None) -> dict[str, Any] | None:
    """What a step and the run take, as plain values; None where nothing tells.

    Args:
        made: the plan of the config's memory.
        probing: what was measured of it.
    """
    if config.actor_rollout_ref.model.recomputes_by_memory and made.recomputed == "full":
        config = with_value(config, "actor_rollout_ref.model.gradient_checkpointing_mode", "full")
    step, said = None, "the probe alone: tandem bench measures the other phases"
    if judge.clock is not None:
        clock, shape = judge.timer(config)
        step, said = partial(clock.step, config, shape, slots=made.slots), clock.said
    if probing is not None:
        seconds = probing.seconds(config, step)
        said += "; writing and rewards as measured" if step else ""
    elif step is not None:
        seconds = step(judge.lengths)
    else:
        return None
    steps = _steps(config)
    found = forecast(seconds, judge.lengths.total, steps or 1, config.trainer.world_size)
    if steps is None:
        found |= {"days": None, "device_hours": None}
    return {"by": said, "steps": steps, **found}


def _steps(config: TrainConfig) -> int | None:
    """Of the run; None where neither the config nor its data say so."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    rows = 0
    with suppress(TandemError):
        rows = count_rows(config.data.train_files, config.data.train_max_samples)
    return config.trainer.steps(rows // config.data.train_batch_size) or None


def print_time(found: Mapping[str, Any] | None, devices: int, probing: Probing | None) -> None:
    if found is None:
        return
    if probing is not None:
        probing.print(found["phases"])
    say(f"\nseconds of a step, by {found['by']}:")
    parts = {phase: seconds for phase, seconds in found["phases"].items() if seconds}
    say("  " + ", ".join(f"{phase} {seconds:.3g}" for phase, seconds in parts.items()))
    each = found["phases"]["step"] / 3600 * devices
    run = f"a step is {each:.3g} GPU hours; with trainer.total_training_steps or data, so is the run"
    if found["steps"]:
        run = f"{found['steps']} steps: {found['days']:.3g} days, {found['device_hours']:.4g} GPU hours"
    say(f"  {found['tokens_per_s']:,.0f} tokens/s; {run}")


def print_schedules(found: Sequence[Schedule]) -> None:
    if not found:
        return
    say("\nschedule             training  rollout  s a step  training, rollout wait  stale  GiB left")
    for each in found:
        sizes = f"{each.name:<21}{each.training:>8}{each.rollout:>9}{each.step:>10.3g}"
        waits = f"{each.waits['training']:>11.0%},{each.waits['rollout']:>8.0%}    {each.staleness:>7}"
        say(f"{sizes}{waits}  {', '.join(f'{pool} {size / GIB:.1f}' for pool, size in each.left.items())}")
    best = chosen(found)
    ratio = found[-1].step / best.step
    fits = "" if min(best.left.values()) >= 0 else ", though it does not fit"
    say(f"choose {best.name}{' '.join([':', *as_words(best.keys)]) if best.keys else ''}{fits}")
    say(f"one step off is not there: tandem train is synchronous. It would take {ratio:.2f} of that time")


def as_words(keys: Mapping[str, Any]) -> list[str]:
    """key=value of each."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def write_fit(
    config: TrainConfig, path: str | None, overrides: Sequence[str], judge: Judge, out: Path
) -> list[str]:
    """Writes what was given, with what a search changed; the changes in words.

    Args:
        path, overrides: what the config was loaded from.

    Raises:
        ConfigError: nothing fits, or the file cannot be written.
    """
    found = search(config, judge)
    if not found.changes:
        raise ConfigError("no sizes that are searched divide devices and heads", field="--fit")
    if found.seconds is None:
        raise ConfigError(
            "nothing that was tried fits with a twentieth of the device left",
            field="--fit",
            expected=f"{found.lacking / GIB:.1f} GiB more, of the nearest",
            got=" ".join(as_words(found.changes)),
            remedy="take more or larger devices, or shorter sequences",
        )
    changed = {key: value for key, value in found.changes.items() if value_at(config, key) != value}
    *_, given = read_sources(path, [*overrides, *as_words(found.changes)])
    try:
        out.write_text(yaml.safe_dump(given, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError("cannot be written", field="--out", got=error) from error
    return [
        f"{key}: {json.dumps(value_at(config, key))} -> {json.dumps(each)}" for key, each in changed.items()
    ]
