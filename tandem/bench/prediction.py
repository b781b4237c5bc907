"""What a config's steps and its run will take, of what a device was measured to do. Nothing here needs
torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.bench.asked import draw, load
from tandem.config.model import stored_config
from tandem.errors import ConfigError
from tandem.lifetime import scratch_folder
from tandem.memory.device_file import Device, read_devices
from tandem.memory.seconds import forecast, predict, step_work
from tandem.memory.shapes import model_shape


def predicted(words: Sequence[str], prompts: str, responses: str, file: Path, name: str) -> dict[str, Any]:
    """The forecast of a config, as plain values.

    Args:
        words: of a config of `tandem train`; models may be as for a benchmark with dummy weights.
        prompts, responses: lengths, as of a benchmark.
        file: of measured devices.
        name: of the device; "" is the one that is there alone.

    Raises:
        TandemError: a wrong config or lengths; no such device.
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
    """
    Raises:
        ConfigError: the file has none, several and none was named, or not the one that was.
    """
    there = read_devices(file)
    if name in there or (not name and len(there) == 1):
        return next((each, device) for each, device in there.items() if name in ("", each))
    raise ConfigError(
        "name a device that was measured" if there else "no device was measured yet",
        field="--device",
        got=name or None,
        expected=" or ".join(repr(each) for each in there) or f"a device in {file}",
        remedy=None if there else "run tandem bench on it, better with several configs of different sizes",
    )


def told(found: dict[str, Any]) -> str:
    """The forecast in lines."""
    lines = [f"{phase:<20} {seconds:>10.3f} s" for phase, seconds in found["phases"].items()]
    run = f"{found['steps']} steps: {found['days']:.3g} days, {found['device_hours']:.3g} device hours"
    return "\n".join(
        [*lines, f"{found['tokens_per_s']:,.0f} tokens/s on {found['devices']} × {found['device']}", run]
    )
