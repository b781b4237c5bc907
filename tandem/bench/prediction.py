"""Predict the time of a run from a device's measurements. This module does not need torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.bench.asked import draw, load
from tandem.config.changed_models import stored_config
from tandem.errors import ConfigError
from tandem.lifetime import scratch_folder
from tandem.memory.device_file import Device, read_devices
from tandem.memory.seconds import forecast, predict, step_work
from tandem.memory.shapes import model_shape


def predicted(words: Sequence[str], prompts: str, responses: str, file: Path, name: str) -> dict[str, Any]:
    """Return the predicted times of a config, as JSON-like values.

    Args:
        words: words of a config of `tandem train`. A model may be only a config.json or a known name.
        prompts: lengths of the prompts, as for a benchmark.
        responses: lengths of the responses, as for a benchmark.
        file: the device file.
        name: name of the device; "": the only device in the file.

    Raises:
        TandemError: the config or the lengths are invalid, or the device is unknown.
    """
    with scratch_folder("bench") as folder:
        config, _ = load(words, folder, dummy=True)
        shape = model_shape(stored_config(config.actor_rollout_ref.model.path))
    drawn = draw(config, prompts, responses)
    chosen, device = _device(file, name)
    work = step_work(config, shape, drawn.prompts, drawn.responses.ravel(), item=device.item)
    phases = predict(work, device.rates, device.factors)
    steps = config.trainer.total_training_steps or 1
    found = forecast(phases, drawn.total, steps, config.trainer.world_size)
    return {"device": chosen, "devices": config.trainer.world_size, "steps": steps, **found}


def _device(file: Path, name: str) -> tuple[str, Device]:
    """Return the name of a device, and the device.

    Raises:
        ConfigError: the file has no devices, the file lacks the named device, or it has several devices and
            `name` is "".
    """
    there = read_devices(file)
    if name in there or (not name and len(there) == 1):
        return next((each, device) for each, device in there.items() if name in ("", each))
    raise ConfigError(
        "choose a measured device" if there else "no device has been measured yet",
        field="--device",
        got=name or None,
        expected=" or ".join(repr(each) for each in there) or f"a device in {file}",
        remedy=None if there else "run `tandem bench` on it, best with several configs of different sizes",
    )


def told(found: dict[str, Any]) -> str:
    """Return the predicted times as lines of text."""
    lines = [f"{phase:<20} {seconds:>10.3f} s" for phase, seconds in found["phases"].items()]
    run = f"{found['steps']} steps: {found['days']:.3g} days, {found['device_hours']:.3g} device hours"
    return "\n".join(
        [*lines, f"{found['tokens_per_s']:,.0f} tokens/s on {found['devices']} × {found['device']}", run]
    )
