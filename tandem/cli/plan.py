"""`tandem plan [CONFIG.yaml] key=value …`"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.config.sources import split_arguments
from tandem.data.files import count_rows
from tandem.errors import ConfigError
from tandem.memory.host import host_total
from tandem.memory.levers import Lever, levers
from tandem.memory.plan import GIB, Phase, Plan, gib, plan
from tandem.memory.shapes import shape_of
from tandem.observability.terminal import say

USAGE = """usage: tandem plan [CONFIG.yaml] key=value … [--device 80GB | --devices 8x80GB] [--json]

Says what every phase of a run will hold on a device, from the config alone: neither the model's weights nor
the data need to be here. A model that is not here is known by its name, such as Qwen/Qwen2.5-7B.
  --device SIZE     memory of a device; 80GB where this is not said. With trainer.device=cpu, this host's
  --devices NxSIZE  so many devices, for trainer.nnodes and trainer.n_gpus_per_node; 8 on a node at most
  --json            the plan for programs
Exit status 1 where the run does not fit."""
_DEVICE = re.compile(r"(?:(?P<count>\d+)x)?(?P<size>\d+(?:\.\d+)?)\s*(?:GB|GiB|G)", re.IGNORECASE)
_DEFAULT = 80.0
_PER_NODE = 8
_FILLS = {  # a part's letter in the bar
    **{"others": "o", "context": "x", "weights": "W", "optimizer": "O", "gathered": "g", "gradients": "G"},
    **{"activations": "A", "head": "h", "engine": "E", "cache": "K", "reserve": "r", "gaps": "f"},
}
_BAR = 32
_SHOWN = 6


def plan_memory(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    words, count, size = _options(arguments)
    if count is not None:
        nodes = -(-count // _PER_NODE)
        if count % nodes:
            raise ConfigError(
                "so many devices are not spread evenly over nodes of 8", field="--devices", got=count
            )
        words += [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={count // nodes}"]
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    config = load_train_config(*split_arguments(words), count_rows=count_rows, elsewhere=True).config
    device = _device_bytes(config, size)
    made = plan(config, shape_of, device)
    found = [] if made.fits else levers(config, lambda changed: plan(changed, shape_of, device))
    if as_json:
        print(json.dumps(_as_json(made, found), indent=1))
    else:
        _print(config, made, found)
    return 0 if made.fits else 1


def _options(arguments: list[str]) -> tuple[list[str], int | None, float | None]:
    """The other words, how many devices are asked for, and GiB of each."""
    words, count, size = [], None, None
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in ("--device", "--devices"):
            words.append(word)
            continue
        text = value if equals else next(rest, "")
        match = _DEVICE.fullmatch(text)
        if match is None or float(match["size"]) <= 0 or match["count"] == "0":
            raise ConfigError(
                "no size of devices", field=name, got=text or "nothing", expected="such as 80GB, or 8x80GB"
            )
        count = int(match["count"]) if match["count"] else count
        size = float(match["size"])
    return words, count, size


def _device_bytes(config: TrainConfig, size: float | None) -> float:
    if size is not None:
        return size * GIB
    return float(host_total()) if config.trainer.device == "cpu" else _DEFAULT * GIB


def _print(config: TrainConfig, made: Plan, found: list[Lever]) -> None:
    policy = config.actor_rollout_ref
    shape = shape_of(policy.model.path)
    print(
        f"{policy.model.path}: {shape.parameters / 1e9:.2f}B parameters, "
        f"{config.trainer.world_size} devices of {gib(made.device)}"
    )
    print(f"\n{'phase':<16} {'GiB':>7}  {'of the device':<{_BAR + 2}}  what fills it")
    for phase in made.phases:
        name = phase.name if len({each.pool for each in made.phases}) == 1 else f"{phase.name} ({phase.pool})"
        print(f"{name:<16} {phase.total / GIB:7.1f}  [{_bar(phase, made.device)}]  {_parts(phase)}")
    print(" " * 26 + "  ".join(f"{letter} {part}" for part, letter in _FILLS.items()) + "\n")
    print(f"worst: {made.at_worst()}")
    print(f"host, fullest node: {_sizes(made.host)}")
    print(f"disk, a checkpoint: {gib(made.disk['checkpoint'])}")
    for note in dict.fromkeys(made.notes):
        print(f"note: {note}")
    if not made.fits:
        print("\nit does not fit. What to change, one at a time, and what the worst moment gains by it:")
        for lever in found[:_SHOWN]:
            say(f"  {gib(lever.gain):>9}  {' '.join(lever.words)}{'   fits then' if lever.fits else ''}")
        if not any(lever.fits for lever in found):
            say("  none of these suffices alone: take several, or more devices")


def _bar(phase: Phase, device: float) -> str:
    """As many letters as its share of the device has 32nds, each part its own; ! for what is beyond."""
    text, filled = "", 0.0
    for part, letter in _FILLS.items():
        filled += phase.parts.get(part, 0.0)
        text += letter * (round(filled / device * _BAR) - len(text))
    return text.ljust(_BAR, ".") if len(text) <= _BAR else text[: _BAR - 1] + "!"


def _parts(phase: Phase) -> str:
    large = sorted(phase.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {size / GIB:.1f}" for part, size in large[:4] if size >= 0.05 * GIB)


def _sizes(parts: dict[str, float]) -> str:
    return ", ".join(f"{part} {gib(size)}" for part, size in parts.items() if size) or "nothing"


def _as_json(made: Plan, found: list[Lever]) -> dict[str, Any]:
    """Sizes are bytes."""
    phases = [{**asdict(phase), "total": phase.total, "needed": phase.needed} for phase in made.phases]
    return {
        "device": made.device,
        "fits": made.fits,
        "margin": made.margin,
        "worst": made.worst.name,
        "phases": phases,
        "host": made.host,
        "disk": made.disk,
        "notes": list(dict.fromkeys(made.notes)),
        "levers": [lever._asdict() for lever in found],
    }
