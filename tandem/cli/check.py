"""The command `tandem check`."""

from __future__ import annotations

from typing import Any

from tandem.cli import from_verl
from tandem.cli.resolved import LOADERS
from tandem.cli.signals import import_module
from tandem.cli.typed import worded
from tandem.config.load import Loaded, load_tried_config
from tandem.config.root import TrainConfig
from tandem.config.sizes import derived
from tandem.config.sources import split_arguments
from tandem.data.files import count_rows
from tandem.errors import ConfigError, IncompleteModelError, TandemError
from tandem.observability.sinks.registry import absent_sinks
from tandem.observability.terminal import say
from tandem.trainer.here import crowded, missing_here, refuse, unfit

OPTIONS = ("--sft", "--rm", "--run", "--here")


@worded
def check(arguments: list[str]) -> int:
    """Check a config and report everything that is wrong with it.

    usage: tandem check [CONFIG.yaml] key=value … [--sft | --rm | --run | --here]
           tandem check --from-verl SCRIPT.sh [key=value …] [-- ARGUMENTS…]
           tandem check --model DIR [model.override_config.NAME=VALUE …]

    The check also reads the data and the model that the config names, as the run would read them. It lists
    what the run needs and this machine lacks, such as a GPU or Ray.
      --here  exit with status 1 also if this machine lacks something that the run needs
      --sft   check a config of `tandem sft`, not of `tandem train`
      --rm    check a config of `tandem rm`
      --run   then build the run and take two steps with learning rate 0, in a temporary folder. The
              log-probs of rollout and training must agree within rounding, and the weights must not change;
              otherwise the exit status is 1.
      --model DIR   test the architecture of a model folder on the CPU, with a small copy of it in float64.
              The test answers three questions. Are sequences that are packed into one row independent of each
              other? Does each get the same log-probs as alone in transformers' own model, also beyond the
              model's attention windows? Can the native rollout engine run the model? The exit status is 1
              if training, or generation with the native engine, would be wrong. The keys
              model.override_config, model.resize_embeddings and model.trust_remote_code apply.
      --from-verl SCRIPT.sh, --call N, --script-limit SECONDS
              read the settings from a shell script that calls verl, as `tandem train` does
    """
    if "--model" in arguments:
        return _model([word for word in arguments if word != "--model"])
    given = [option for option in OPTIONS if option in arguments]
    if len(set(given) - {"--here"}) > 1 or {"--run", "--here"} <= set(given):
        raise ConfigError(
            "--run is for configs of `tandem train`, and includes the checks of --here",
            got=" ".join(given),
            remedy="leave one out",
        )
    words = [word for word in arguments if word not in OPTIONS]
    request = from_verl.requested(words)
    if request is None:
        command = next((name for name in ("sft", "rm") if f"--{name}" in given), "train")
        counting = {"count_rows": count_rows} if command == "train" else {}
        loaded = LOADERS[command](*split_arguments(words), **counting)
        for notice in loaded.messages:
            say(f"note: {notice}")
        return _said(loaded, command, given)
    if {"--sft", "--rm"} & set(given):
        raise ConfigError(
            "--from-verl is for configs of `tandem train`", got=" ".join(given), remedy="leave one out"
        )
    return _said(from_verl.load(request), "train", given)


def _said(loaded: Loaded[Any], command: str, given: list[str]) -> int:
    """Print a config's sizes and what this machine lacks; with `--run`, also run the control steps.

    Returns:
        the exit status.

    Raises:
        TandemError: the data or the model cannot be used; with --here, also if this machine lacks something.
    """
    for name, value in (derived(loaded.config) if command == "train" else {}).items():
        print(f"{name}: {value}")
    missing = [*missing_here(loaded.config), *absent_sinks(loaded.config.trainer.logger).values()]
    known = set(map(str, missing))
    found = [error for error in unfit(loaded.config) if str(error) not in known]
    missing += [error for error in found if isinstance(error, IncompleteModelError)]
    wrong = [error for error in found if error not in missing]
    refuse([*missing, *wrong] if "--here" in given else wrong)
    print("the config is sound")
    if slow := crowded(loaded.config.trainer):
        say(f"note: {slow}")
    if missing:
        say(f"to run it on this machine, `tandem {command}` also needs:")
    for error in missing:
        say(str(error))
    return _control(loaded) if "--run" in given else 0


def _model(words: list[str]) -> int:
    folders = [word for word in words if "=" not in word]
    if len(folders) != 1:
        raise ConfigError("--model takes one folder", got=" ".join(folders) or "none")
    loaded = load_tried_config(folders[0], [word for word in words if "=" in word])
    for notice in loaded.messages:
        say(f"note: {notice}")
    tried = loaded.config.model
    found, model = import_module("tandem.models.packed_check").check_packed(
        tried.path, trust_remote_code=tried.trust_remote_code
    )
    print("\n".join(found.lines))
    trial = import_module("tandem.trainer.trial")
    wrong = False
    try:
        difference = trial.native_difference(model, beyond=found.sound)
        wrong = not difference <= trial.LIMIT
        native = f"{difference:.3g} from transformers' own model (limit {trial.LIMIT:g})"
    except TandemError as error:
        native = f"this engine cannot run the model, use another engine: {error}"
    print(f"rollout.name=native: {native}")
    if found.sound:
        print("the model can be trained" + (", but not with rollout.name=native" if wrong else ""))
    elif found.sound_within and found.limit is not None:
        print(f"wrong: the model cannot be trained beyond {found.limit} tokens")
    else:
        print("wrong: the model cannot be trained")
    return 0 if found.sound and not wrong else 1


def _control(loaded: Loaded[TrainConfig]) -> int:
    """Take two steps with learning rate 0. Return 1 if they show a fault of the setup, else 0."""
    run_control = import_module("tandem.trainer.control").run_control
    report = run_control(loaded.config, say=say)
    print(f"\n{'probe':<28} {'step 1':>11} {'step 2':>11} {'floor':>11}")
    for probe in report.probes:
        verdict = "" if probe.at_floor else "  above"
        print(f"{probe.name:<28} {probe.first:>11.3g} {probe.second:>11.3g} {probe.floor:>11.3g}{verdict}")
    if not report.causes:
        print("rollout and training agree")
        return 0
    for cause in report.causes:
        say(f"wrong: {cause}")
    return 1
