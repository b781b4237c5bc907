"""`tandem plan [CONFIG.yaml] key=value …`"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.bench.asked import draw
from tandem.cli.fitting import as_words, judge_of, print_schedules, print_time, time_of, write_fit
from tandem.cli.probing import Probing
from tandem.cli.typed import worded
from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.config.sources import split_arguments
from tandem.data.files import count_rows
from tandem.errors import ConfigError
from tandem.memory.device_file import default_path, read_devices
from tandem.memory.host import host_total
from tandem.memory.levers import Lever, levers
from tandem.memory.peaks import CLASSES
from tandem.memory.plan import GIB, Phase, Plan, gib
from tandem.memory.schedules import chosen, compare, refuse_apart
from tandem.memory.shapes import shape_of
from tandem.memory.timing import Clock
from tandem.observability.terminal import say

_DEVICE = re.compile(
    rf"(?:(?P<count>\d+)x)?(?:(?P<size>\d+(?:\.\d+)?)\s*(?:GB|GiB|G)|(?P<kind>{'|'.join(CLASSES)}))",
    re.IGNORECASE,
)
_OPTIONS = (
    *("--device", "--devices", "--fit", "--out", "--lengths", "--prompt-lengths"),
    *("--probe", "--probe-seconds"),
)
_SWITCHES = ("--schedule", "--json")
_APART = ({"--fit", "--schedule"}, {"--probe", "--lengths"}, {"--probe", "--prompt-lengths"})
_DEFAULT = 80.0
_PER_NODE = 8
_FILLS = {  # a part's letter in the bar
    **{"others": "o", "context": "x", "weights": "W", "optimizer": "O", "gathered": "g", "gradients": "G"},
    **{"activations": "A", "head": "h", "engine": "E", "cache": "K", "reserve": "r", "gaps": "f"},
}
_BAR = 32
_SHOWN = 6


@worded
def plan_memory(arguments: list[str]) -> int:
    """usage: tandem plan [CONFIG.yaml] key=value … [--device 80GB | --devices 8x80GB] [--json]
           tandem plan [CONFIG.yaml] key=value … --fit 8x80GB [--out FILE.yaml]
           tandem plan [CONFIG.yaml] key=value … --probe [32]
           tandem plan [CONFIG.yaml] key=value … --schedule --devices 8xH100

    Says what every phase of a run will hold on a device, from the config alone: neither the model's weights
    nor the data need to be here, but for --probe. A model that is not here is known by its name, such as
    Qwen/Qwen2.5-7B.
      --device SIZE     memory of a device; 80GB where this is not said. With trainer.device=cpu, this host's
      --devices NxSIZE  so many devices, for trainer.nnodes and trainer.n_gpus_per_node; 8 on a node at most
      --fit NxSIZE      searches parallel sizes, token budgets, recomputation, offload and the rollout's cache
                        for the fastest config that fits so many devices, and writes it; all else stays
      --out FILE        where to; fit-NxSIZE.yaml where this is not said
      SIZE may be a kind, whose factors and peaks then count: A10, A100-40, A100, H100, H200
      --lengths, --prompt-lengths  tokens as of tandem bench, for the seconds; the greatest where not said
      --probe [N]       answers and scores N prompts (32), drawn from the data, with the model, the engine and
                        the reward: what share of groups will teach anything, how long responses are, what
                        rewards cost, and the seconds with these. Nothing is left in the run folder
      --probe-seconds S for sampling, by the pace of the first few prompts: 600
      --schedule        compares generation and learning on the same devices, on devices of their own, and at
                        the same time, each with its best split
      --json            the plan for programs
    Exit status 1 where the run does not fit.
    """
    words, options = _options(arguments)
    sized, size, kind = _devices(options)
    path, overrides = split_arguments([*words, *sized])
    loaded = load_train_config(path, overrides, count_rows=count_rows, elsewhere=True)
    config = loaded.config
    overrides = [*as_words({name: value for name, (value, _) in loaded.chosen.items()}), *overrides]
    lengths = draw(config, options.get("--prompt-lengths", ""), options.get("--lengths", ""))
    if "--schedule" in options:
        refuse_apart(config)
    probing = Probing(*split_arguments(words), options) if "--probe" in options else None
    if probing is not None:
        config, lengths = probing.placed(config), probing.lengths(config)
    judge = judge_of(path, overrides, *_device(config, size, kind), lengths)
    changed: list[str] = []
    if "--fit" in options:
        out = Path(options.get("--out") or f"fit-{options['--fit']}.yaml")
        changed = write_fit(config, path, overrides, judge, out)
        config = load_train_config(str(out), elsewhere=True).config
    made = judge.plan(config)
    found = [] if made.fits else levers(config, judge.plan)
    timed = time_of(config, made, judge, probing)
    schedules = compare(config, judge) if "--schedule" in options else []
    if "--json" in options:
        whole = _as_json(made, found) | {"time": timed, "changed": changed}
        if schedules:
            whole |= {"schedules": [asdict(each) for each in schedules], "choose": chosen(schedules).name}
        whole |= {"probe": probing.report} if probing else {}
        print(json.dumps(whole, indent=1))
        return 0 if made.fits else 1
    _print(config, made, found)
    print_time(timed, config.trainer.world_size, probing)
    print_schedules(schedules)
    if "--fit" in options:
        say(f"\nwritten to {out}; changed:\n  " + "\n  ".join(changed or ["nothing"]))
    return 0 if made.fits else 1


def _device(config: TrainConfig, size: float | None, kind: str | None) -> tuple[float, Clock | None]:
    """Return a device's memory in bytes, and the rates of its kind."""
    cuda = config.trainer.device != "cpu"
    memory = size * GIB if size is not None else _DEFAULT * GIB if cuda else float(host_total())
    return memory, Clock.of(read_devices(default_path()), kind, size or _DEFAULT, cuda=cuda)


def _options(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The other words, and the options; that of a switch, and of `--probe` without a number, is empty."""
    words, options = [], {}
    rest = deque(arguments)
    while rest:
        name, equals, value = (word := rest.popleft()).partition("=")
        if name not in (*_OPTIONS, *_SWITCHES):
            words.append(word)
        elif equals or name in _SWITCHES or (name == "--probe" and not (rest and rest[0].isdecimal())):
            options[name] = value
        else:
            options[name] = rest.popleft() if rest else ""
    for pair in _APART:
        if pair <= options.keys():
            raise ConfigError("do not go together", got=" and ".join(sorted(pair)), remedy="leave one out")
    if "--probe-seconds" in options and "--probe" not in options:
        raise ConfigError("is of --probe, which is not there", field="--probe-seconds")
    return words, options


def _devices(options: Mapping[str, str]) -> tuple[list[str], float | None, str | None]:
    """The devices that were asked for: the keys of so many, GiB of each, and their kind, one of `CLASSES`;
    nothing of what was not said."""
    count, size, kind = 0, None, None
    for name in ("--device", "--devices", "--fit"):
        if name not in options:
            continue
        match = _DEVICE.fullmatch(options[name])
        kind = match["kind"].upper() if match and match["kind"] else None
        size = CLASSES[kind].size if kind else float(match["size"] if match else 0)
        if match is None or size <= 0 or match["count"] == "0":
            raise ConfigError(
                "no size of devices",
                field=name,
                got=options[name] or "nothing",
                expected="such as 80GB, 8x80GB or 8xH100",
            )
        count = int(match["count"] or count)
    nodes = -(-count // _PER_NODE)
    if not count:
        return [], size, kind
    if count % nodes:
        message = "so many devices are not spread evenly over nodes of 8"
        raise ConfigError(message, field="--devices", got=count)
    return [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={count // nodes}"], size, kind


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
