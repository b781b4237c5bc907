"""The commands `tandem sft` and `tandem rm`, which train on examples."""

from __future__ import annotations

from tandem.cli.resolved import LOADERS, resolved
from tandem.cli.signals import import_module
from tandem.cli.typed import worded
from tandem.observability.terminal import say
from tandem.trainer.here import lacking, refuse


@worded
def sft(arguments: list[str]) -> int:
    """Fine-tune a model on example responses (SFT).

    usage: tandem sft [CONFIG.yaml] key=value … [--dry-run]

    Each example is a row with a column of messages, or with columns of a prompt and a response.
      --dry-run   print the resolved config and stop
    """
    return _train(arguments, "sft")


@worded
def rm(arguments: list[str]) -> int:
    """Train a reward model on preferences.

    usage: tandem rm [CONFIG.yaml] key=value … [--dry-run]

    Each preference is a row with columns of a chosen and a rejected response.
      --dry-run   print the resolved config and stop
    """
    return _train(arguments, "rm")


def _train(arguments: list[str], command: str) -> int:
    config = resolved(arguments, LOADERS[command])
    if config is None:
        return 0
    refuse(lacking(config))
    run = getattr(import_module("tandem.trainer.run"), f"run_{command}")
    return 130 if run(config, say=say) else 0
