"""What `tandem plan` says of time, and its search for a config that fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tandem.bench.asked import Lengths
from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.config.schema import value_at
from tandem.config.sources import read_sources
from tandem.data.files import count_rows
from tandem.errors import ConfigError, ConfigErrors, TandemError
from tandem.memory.fit import Found, Judge, search
from tandem.memory.levers import with_value
from tandem.memory.plan import GIB, Plan, plan
from tandem.memory.seconds import Shape, forecast
from tandem.memory.shapes import ModelShape
from tandem.memory.space import default_space
from tandem.memory.timing import Clock
from tandem.observability.terminal import say

Shapes = Callable[[str], ModelShape]


def time_of(
    config: TrainConfig, made: Plan, clock: Clock, shapes: Shapes, lengths: Lengths
) -> dict[str, Any]:
    """What a step and the run take, as plain values.

    Args:
        made: the plan of the config's memory.
        lengths: of a step's sequences.
    """
    model = config.actor_rollout_ref.model
    shape = shapes(model.path)
    if model.recomputes_by_memory and made.recomputed == "full":
        config = with_value(config, "actor_rollout_ref.model.gradient_checkpointing_mode", "full")
    seconds = clock.step(
        config, Shape(shape.decoder, shape.vocabulary), lengths.prompts, lengths.responses.ravel(), made.slots
    )
    steps = _steps(config)
    found = forecast(seconds, lengths.total, steps or 1, config.trainer.world_size)
    if steps is None:
        found |= {"days": None, "device_hours": None}
    return {"by": clock.said, "steps": steps, **found}


def _steps(config: TrainConfig) -> int | None:
    """Of the run; None where neither the config nor its data say so."""
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    rows = 0
    with suppress(TandemError):
        rows = count_rows(config.data.train_files, config.data.train_max_samples)
    return config.trainer.steps(rows // config.data.train_batch_size) or None


def print_time(found: Mapping[str, Any], devices: int) -> None:
    say(f"\nseconds of a step, by {found['by']}:")
    parts = {phase: seconds for phase, seconds in found["phases"].items() if seconds}
    say("  " + ", ".join(f"{phase} {seconds:.3g}" for phase, seconds in parts.items()))
    each = found["phases"]["step"] / 3600 * devices
    run = f"a step is {each:.3g} GPU hours; with trainer.total_training_steps or data, so is the run"
    if found["steps"]:
        run = f"{found['steps']} steps: {found['days']:.3g} days, {found['device_hours']:.4g} GPU hours"
    say(f"  {found['tokens_per_s']:,.0f} tokens/s; {run}")


def fit_config(
    config: TrainConfig,
    path: str | None,
    overrides: Sequence[str],
    device: float,
    clock: Clock,
    shapes: Shapes,
    lengths: Lengths,
) -> Found:
    """What a search finds for devices of so many bytes.

    Args:
        path, overrides: what the config was loaded from.
        lengths: of a step's sequences.
    """
    shape = shapes(config.actor_rollout_ref.model.path)
    timed = Shape(shape.decoder, shape.vocabulary)
    prompts, responses = lengths.prompts, lengths.responses.ravel()
    judge = Judge(
        lambda changed: plan(changed, shapes, device),
        lambda changed, slots: clock.step(changed, timed, prompts, responses, slots)["step"],
        lambda keys: _accepted(path, [*overrides, *as_words(keys)]),
    )
    return search(config, shape, default_space(config, shape), judge)


def _accepted(path: str | None, overrides: Sequence[str]) -> bool:
    try:
        load_train_config(path, overrides, elsewhere=True)
    except ConfigErrors:
        return False
    return True


def as_words(keys: Mapping[str, Any]) -> list[str]:
    """key=value of each."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def write_fit(
    path: str | None, overrides: Sequence[str], config: TrainConfig, found: Found, out: Path
) -> list[str]:
    """Writes what was given, with what a search changed; the changes in words.

    Raises:
        ConfigError: the file cannot be written.
    """
    changed = {key: value for key, value in found.changes.items() if value_at(config, key) != value}
    given, *_ = read_sources(path, [*overrides, *as_words(found.changes)])
    try:
        out.write_text(yaml.safe_dump(given, sort_keys=False))
    except OSError as error:
        raise ConfigError("cannot be written", field="--out", got=error) from error
    return [
        f"{key}: {json.dumps(value_at(config, key))} -> {json.dumps(each)}" for key, each in changed.items()
    ]


def refuse(found: Found) -> ConfigError:
    """What lacks where nothing fits."""
    if not found.changes:
        return ConfigError("no sizes that are searched divide devices and heads", field="--fit")
    return ConfigError(
        "nothing that was tried fits with a twentieth of the device left",
        field="--fit",
        expected=f"{found.lacking / GIB:.1f} GiB more, of the nearest",
        got=" ".join(as_words(found.changes)),
        remedy="take more or larger devices, or shorter sequences",
    )
