"""The command `tandem`. Each subcommand lives in a file of its own, loaded only when it is called, so
that those that need no torch answer at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from tandem.cli.signals import begin, end_at_signals, import_module, raise_interrupts

# name: ("module:function", what it does)
COMMANDS = {
    "demo": ("demo:demo", "a small policy learns arithmetic or another task, on any machine, in minutes"),
    "train": ("train:train", "reinforcement learning: PPO, GRPO, RLOO, REINFORCE++"),
    "sft": ("sft:sft", "supervised fine-tuning"),
    "rm": ("sft:rm", "a reward model from preferences"),
    "generate": ("generate:generate", "a file of prompts to a file of responses"),
    "eval": ("eval:evaluate", "accuracy, pass@k and maj@k of a model, or of responses it wrote"),
    "runs": ("runs:runs", "lists runs; compares, plots and prunes them"),
    "view": ("view:view", "runs in a browser: curves, samples, time, warnings"),
    "samples": ("samples:samples", "what the policy of a run wrote"),
    "replay": (
        "replay:replay",
        "takes a step of a run again, as it was or changed, and takes its gradient apart",
    ),
    "data": ("data:data", "checks, converts, shows, splits and thins out data files"),
    "bench": ("bench:bench", "the phases of real steps with dummy weights, beside their floors"),
    "node": ("node:node", "joins this machine to a cluster"),
    "export": ("export:export", "a checkpoint as a Hugging Face model folder"),
    "check": ("check:check", "says everything that is wrong with a config"),
    "plan": ("plan:plan_memory", "what a run will hold on its devices, from the config alone"),
    "from-trl": ("from_peer:from_trl", "a config from TRL's settings"),
    "from-openrlhf": ("from_peer:from_openrlhf", "a config from OpenRLHF's options"),
    "config": ("config:config", "shows a resolved config; explains a key"),
    "logs": ("logs:logs", "shows or follows the log of one rank"),
    "stacks": ("stacks:stacks", "the Python stacks of all processes of a run"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the words after `tandem`; None takes the process's own.

    Returns:
        the exit status: 0, or 1 after an error the user can act on, 2 for an unknown command or option, 3 for
        a config that does without settings which are refused, 130 after an interrupt: Ctrl-C or SIGTERM,
        which here are the same.
    """
    if arguments is None:
        begin()
    process = import_module("tandem.cli.process")
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    if arguments is None:
        process.prepare()
    try:
        status: int = process.outcome(list(sys.argv[1:] if arguments is None else arguments), _run)
        return status
    finally:
        if arguments is None:
            end_at_signals()
        else:
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGTERM, before[1])


def _run(words: list[str]) -> int:
    """Run the command that the words name; its exit status."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] not in COMMANDS:
        import_module("tandem.observability.terminal").warn(f"tandem: no command {words[0]!r}\n\n{usage()}")
        return 2
    if words[1:2] in (["-h"], ["--help"]):
        print(import_module("tandem.cli.guide").guide(words[0]))
    module, function = COMMANDS[words[0]][0].split(":")
    run: Callable[[list[str]], int] = getattr(import_module(f"tandem.cli.{module}"), function)
    raise_interrupts()
    return run(words[1:])


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join(["usage: tandem COMMAND …", "", *lines, "", "tandem COMMAND --help says more."])
