"""`tandem check [CONFIG.yaml] key=value …`"""

from __future__ import annotations

from importlib import import_module

from tandem.config.load import Loaded, load_sft_config, load_train_config
from tandem.config.root import TrainConfig
from tandem.config.sizes import derived
from tandem.config.sources import split_arguments
from tandem.errors import ConfigError

USAGE = """usage: tandem check [CONFIG.yaml] key=value … [--sft | --run]

Says everything that is wrong with a config, without touching a device.
  --sft   a config of `tandem sft`, not of `tandem train`
  --run   then builds the run and takes two steps with learning rate 0, in a temporary folder: rollout and
          training must agree within rounding, and the weights must stay. Exit status 1 where they do not."""
OPTIONS = ("--sft", "--run")


def check(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    if set(OPTIONS) <= set(arguments):
        raise ConfigError("--run is for configs of `tandem train`", got="--sft --run", remedy="leave one out")
    path, overrides = split_arguments([word for word in arguments if word not in OPTIONS])
    if "--sft" in arguments:
        return _sound(load_sft_config(path, overrides).notices, {})
    loaded = load_train_config(path, overrides)
    _sound(loaded.notices, derived(loaded.config))
    return _control(loaded) if "--run" in arguments else 0


def _sound(notices: tuple[str, ...], sizes: dict[str, int | str]) -> int:
    for notice in notices:
        print(f"note: {notice}")
    for name, value in sizes.items():
        print(f"{name}: {value}")
    print("the config is sound")
    return 0


def _control(loaded: Loaded[TrainConfig]) -> int:
    """Two steps that may change nothing; 1 where something did."""
    run_control = import_module("tandem.trainer.control").run_control
    report = run_control(loaded.config, say=lambda sentence: print(sentence, flush=True))
    print(f"\n{'probe':<28} {'step 1':>11} {'step 2':>11} {'floor':>11}")
    for probe in report.probes:
        verdict = "" if probe.at_floor else "  above"
        print(f"{probe.name:<28} {probe.first:>11.3g} {probe.second:>11.3g} {probe.floor:>11.3g}{verdict}")
    if not report.causes:
        print("rollout and training agree")
        return 0
    for cause in report.causes:
        print(f"wrong: {cause}")
    return 1
