"""Compute the times that `tandem plan` prints, and search for a config that fits into memory."""

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
    """Return the `Judge`, which computes memory and time of configs.

    Args:
        path: the file that the config was loaded from, if any.
        overrides: the key=value words that the config was loaded from.
        device: memory of one device, in bytes.
        clock: speeds of the device; None for a CPU that was not measured.
        lengths: the lengths of the sequences of a step.
    """

    def accepts(keys: Mapping[str, Any]) -> bool:
        try:
            load_train_config(path, [*overrides, *as_words(keys)], elsewhere=True)
        except ConfigErrors:
            return False
        return True

    return Judge(device, shape_of, clock, lengths, accepts)


def time_of(config: TrainConfig, made: Plan, judge: Judge, probing: Probing | None) -> dict[str, Any] | None:
    """Return the time of a step and of the run, as JSON-like values; None if unknown.

    Args:
        config: the config.
        made: the plan of the config's memory.
        judge: the judge of the config, with the device's speeds.
        probing: the measurements of `--probe`, if it was given.
    """
    if config.actor_rollout_ref.model.recomputes_by_memory and made.recomputed == "full":
        config = with_value(config, "actor_rollout_ref.model.gradient_checkpointing_mode", "full")
    step, said = None, "the probe only; `tandem bench` measures the other phases"
    if judge.clock is not None:
        clock, shape = judge.timer(config)
        step, said = partial(clock.step, config, shape, slots=made.slots), clock.said
    if probing is not None:
        seconds = probing.seconds(config, step)
        said += "; generation and rewards as measured" if step else ""
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
    """Return the number of steps of the run; None if config and data do not determine it."""
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
    say(f"\nseconds per step, by {found['by']}:")
    parts = {phase: seconds for phase, seconds in found["phases"].items() if seconds}
    say("  " + ", ".join(f"{phase} {seconds:.3g}" for phase, seconds in parts.items()))
    each = found["phases"]["step"] / 3600 * devices
    run = f"a step takes {each:.3g} GPU hours; for the run, set trainer.total_training_steps or give the data"
    if found["steps"]:
        run = f"{found['steps']} steps: {found['days']:.3g} days, {found['device_hours']:.4g} GPU hours"
    say(f"  {found['tokens_per_s']:,.0f} tokens/s; {run}")


def print_schedules(found: Sequence[Schedule]) -> None:
    if not found:
        return
    say("\nschedule             training  rollout  s / step  training, rollout wait  stale  GiB free")
    for each in found:
        sizes = f"{each.name:<21}{each.training:>8}{each.rollout:>9}{each.step:>10.3g}"
        waits = f"{each.waits['training']:>11.0%},{each.waits['rollout']:>8.0%}    {each.staleness:>7}"
        say(f"{sizes}{waits}  {', '.join(f'{pool} {size / GIB:.1f}' for pool, size in each.left.items())}")
    best = chosen(found)
    ratio = found[-1].step / best.step
    fits = "" if min(best.left.values()) >= 0 else ", but it does not fit"
    say(f"choose {best.name}{' '.join([':', *as_words(best.keys)]) if best.keys else ''}{fits}")
    say(f"`tandem train` cannot train one step off; that would take {ratio:.2f} of this time")


def as_words(keys: Mapping[str, Any]) -> list[str]:
    """Return a list of words key=value."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def write_fit(
    config: TrainConfig, path: str | None, overrides: Sequence[str], judge: Judge, out: Path
) -> list[str]:
    """Search for the fastest config that fits into memory, and write the given config with the changes.

    Args:
        config: the config to start from.
        path: the file that the config was loaded from, if any.
        overrides: the key=value words that the config was loaded from.
        judge: rates the configs that are tried.
        out: the file to write.

    Returns:
        a text for each changed key.

    Raises:
        ConfigError: no config fits, or the file cannot be written.
    """
    found = search(config, judge)
    if not found.changes:
        raise ConfigError(
            "none of the parallel sizes that are tried divides the devices and the attention heads",
            field="--fit",
        )
    if found.seconds is None:
        raise ConfigError(
            "no config that was tried fits and leaves 5% of the device free",
            field="--fit",
            expected=f"{found.lacking / GIB:.1f} GiB more, for the config that comes closest",
            got=" ".join(as_words(found.changes)),
            remedy="use more or larger devices, or shorter sequences",
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
