"""The command `tandem`.

The module of a subcommand is imported only when the subcommand is called. So subcommands that do not need
torch start quickly.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

from tandem.cli.signals import begin, end_at_signals, import_module, raise_interrupts

# name: ("module:function", a description)
COMMANDS = {
    "demo": ("demo:demo", "train a small policy on arithmetic or another task, on any machine, in minutes"),
    "train": ("train:train", "train a policy by reinforcement learning: PPO, GRPO, RLOO, REINFORCE++"),
    "sft": ("sft:sft", "fine-tune a model on example responses (SFT)"),
    "rm": ("sft:rm", "train a reward model on preferences"),
    "generate": ("generate:generate", "generate responses to a file of prompts"),
    "eval": (
        "eval:evaluate",
        "measure accuracy, pass@k and maj@k of a model, or of responses that it generated",
    ),
    "runs": ("runs:runs", "list, compare, plot and prune runs"),
    "view": ("view:view", "show runs in a browser: curves, samples, times, warnings"),
    "samples": ("samples:samples", "print the responses that the policy of a run generated"),
    "replay": (
        "replay:replay",
        "repeat a step of a run, unchanged or changed, and analyze its gradient",
    ),
    "data": ("data:data", "check, convert, show, split and deduplicate data files"),
    "bench": ("bench:bench", "measure the phases of training steps, and predict the time of a run"),
    "node": ("node:node", "join this machine to a cluster"),
    "export": ("export:export", "export a checkpoint as a Hugging Face model folder"),
    "check": ("check:check", "report everything that is wrong with a config"),
    "models": ("models:models", "list the architectures that can be trained, and what each can do"),
    "plan": ("plan:plan_memory", "plan a run's memory on its devices, from the config only"),
    "from-trl": ("from_peer:from_trl", "make a config from TRL's settings"),
    "from-openrlhf": ("from_peer:from_openrlhf", "make a config from OpenRLHF's options"),
    "config": ("config:config", "show a resolved config; explain a key"),
    "logs": ("logs:logs", "print or follow the log of a run or of one rank"),
    "stacks": ("stacks:stacks", "print the Python stacks of all processes of a run"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after `tandem`; None: the arguments of this process.

    Returns:
        the exit status: 0 for success; 1 after an error that the user can act on; 2 for an unknown command
        or option; 3 if a config was written without settings that are refused; 130 after an interrupt.
        Ctrl-C and SIGTERM are both interrupts.
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
    """Run the subcommand in the first word, and return its exit status."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] not in COMMANDS:
        near = import_module("difflib").get_close_matches(words[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        warn = import_module("tandem.observability.terminal").warn
        warn(f"tandem: no command {words[0]!r}{hint}\n\n{usage()}")
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
    return "\n".join(
        [
            "usage: tandem COMMAND …",
            "",
            *lines,
            "",
            "`tandem COMMAND --help` explains a command and starts with an example.",
        ]
    )
