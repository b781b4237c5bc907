"""The command `tandem plan`."""

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
from tandem.config.changed_models import given_name
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
_FILLS = {  # the letter of each part in the bar
    **{"others": "o", "context": "x", "weights": "W", "optimizer": "O", "gathered": "g", "gradients": "G"},
    **{"activations": "A", "head": "h", "engine": "E", "cache": "K", "reserve": "r", "gaps": "f"},
}
_BAR = 32
_SHOWN = 6


@worded
def plan_memory(arguments: list[str]) -> int:
    """Plan the memory of a run: what each phase needs on a device.

    usage: tandem plan [CONFIG.yaml] key=value … [--device 80GB | --devices 8x80GB] [--json]
           tandem plan [CONFIG.yaml] key=value … --fit 8x80GB [--out FILE.yaml]
           tandem plan [CONFIG.yaml] key=value … --probe [32]
           tandem plan [CONFIG.yaml] key=value … --schedule --devices 8xH100

    The plan needs only the config. Only --probe also needs the model's weights and the data on this machine.
    For a model that is not on this machine, give its name, such as Qwen/Qwen2.5-7B.
      --device SIZE     memory of one device; default: 80GB, or with trainer.device=cpu this machine's memory
      --devices NxSIZE  number and memory of the devices, 8 per node at most; sets the keys for their number
      --fit NxSIZE      find the fastest config that fits these devices; only parallel sizes, token budgets,
                        recomputation, offload and the rollout's cache may change
      --out FILE        file for the config of --fit; default: fit-NxSIZE.yaml
      SIZE may be a kind of device, whose speeds are then used: A10, A100-40, A100, H100, H200
      --lengths, --prompt-lengths  lengths for the predicted times, as of tandem bench; default: the longest
      --probe [N]       answer and score N prompts (32) as the run would; show the share of groups that would
                        teach something, response lengths and times. The run folder stays as it is
      --probe-seconds S time limit for sampling; a few prompts are always answered; default: 600
      --schedule        compare three schedules, each with its best split: generation and training on the same
                        devices, on separate devices, and at the same time
      --json            print the plan as JSON
    The exit status is 1 if the run does not fit.
    """
    words, options = _options(arguments)
    sized, size, kind = _devices(options)
    path, overrides = split_arguments([*words, *sized])
    loaded = load_train_config(path, overrides, count_rows=count_rows, elsewhere=True)
    config, chosen_values = loaded.config, {name: value for name, (value, _) in loaded.chosen.items()}
    overrides = [*as_words(chosen_values), *overrides]
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
        print(json.dumps(whole | ({"probe": probing.report} if probing else {}), indent=1))
    else:
        _print(config, made, found)
        print_time(timed, config.trainer.world_size, probing)
        print_schedules(schedules)
        if "--fit" in options:
            say(f"\nwrote {out}; changed:\n  " + "\n  ".join(changed or ["nothing"]))
    return 0 if made.fits else 1


def _device(config: TrainConfig, size: float | None, kind: str | None) -> tuple[float, Clock | None]:
    """Return a device's memory in bytes, and the speeds of this type of device."""
    cuda = config.trainer.device != "cpu"
    memory = size * GIB if size is not None else _DEFAULT * GIB if cuda else float(host_total())
    return memory, Clock.of(read_devices(default_path()), kind, size or _DEFAULT, cuda=cuda)


def _options(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split the arguments into other words and a dict from option to value.

    The value of a switch, and of `--probe` without a number, is "".
    """
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
            raise ConfigError(
                "these options exclude each other", got=" and ".join(sorted(pair)), remedy="leave one out"
            )
    if "--probe-seconds" in options and "--probe" not in options:
        raise ConfigError("this option needs --probe", field="--probe-seconds")
    return words, options


def _devices(options: Mapping[str, str]) -> tuple[list[str], float | None, str | None]:
    """Return the number, memory and type of the devices, from the options.

    Returns:
        key=value words for the number of devices; the memory of each device in GiB; the type, one of
        `CLASSES`. A value that the options do not set is empty or None.
    """
    count, size, kind = 0, None, None
    for name in ("--device", "--devices", "--fit"):
        if name not in options:
            continue
        match = _DEVICE.fullmatch(options[name])
        kind = match["kind"].upper() if match and match["kind"] else None
        size = CLASSES[kind].size if kind else float(match["size"] if match else 0)
        if match is None or size <= 0 or match["count"] == "0":
            raise ConfigError(
                "this is not a size of devices",
                field=name,
                got=options[name] or "nothing",
                expected="such as 80GB, 8x80GB or 8xH100",
            )
        count = int(match["count"] or count)
    nodes = -(-count // _PER_NODE)
    if not count:
        return [], size, kind
    if count % nodes:
        message = "this number of devices cannot be split evenly over nodes of at most 8"
        raise ConfigError(message, field="--devices", got=count)
    return [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={count // nodes}"], size, kind


def _short(number: int) -> str:
    """Return a number with three digits and B, M or k."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number / 1e3:.1f}k"


def _print(config: TrainConfig, made: Plan, found: list[Lever]) -> None:
    policy = config.actor_rollout_ref
    shape = shape_of(policy.model.path)
    count = config.trainer.world_size
    print(
        f"{given_name(policy.model.path)}: {_short(shape.parameters)} parameters, "
        f"{count} device{'s' if count > 1 else ''} of {gib(made.device)}"
    )
    print(f"\n{'phase':<16} {'GiB':>7}  {'of the device':<{_BAR + 2}}  largest parts")
    for phase in made.phases:
        name = phase.name if len({each.pool for each in made.phases}) == 1 else f"{phase.name} ({phase.pool})"
        print(f"{name:<16} {phase.total / GIB:7.1f}  [{_bar(phase, made.device)}]  {_parts(phase)}")
    print(" " * 26 + "  ".join(f"{letter} {part}" for part, letter in _FILLS.items()) + "\n")
    print(f"worst: {made.at_worst()}")
    print(f"host memory, fullest node: {_sizes(made.host)}")
    print(f"disk, one checkpoint: {gib(made.disk['checkpoint'])}")
    for note in dict.fromkeys(made.notes):
        print(f"note: {note}")
    if not made.fits:
        print("\nthe run does not fit. Single changes, and the memory that each saves at the worst moment:")
        for lever in found[:_SHOWN]:
            say(f"  {gib(lever.gain):>9}  {' '.join(lever.words)}{'   the run fits' if lever.fits else ''}")
        if not any(lever.fits for lever in found):
            say("  no single change is enough: combine several, or use more devices")


def _bar(phase: Phase, device: float) -> str:
    """Return a bar of letters that shows how a device's memory is used.

    Each use of memory has a different letter, and each letter in the bar is 1/32 of the memory. A ! at the
    end means that the memory is too small.
    """
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
    """Return the plan as JSON-like values. Sizes are in bytes."""
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
