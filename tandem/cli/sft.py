"""`tandem sft [CONFIG.yaml] key=value …`"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.cli.resolved import resolved
from tandem.cli.signals import import_module
from tandem.config.load import Loaded, load_sft_config
from tandem.observability.terminal import say
from tandem.trainer.here import lacking, refuse

USAGE = """usage: tandem sft [CONFIG.yaml] key=value … [--dry-run]

Fine-tunes a model on demonstrations: a column of messages, or of prompts and responses.
  --dry-run   print the resolved config and stop"""


def sft(arguments: list[str]) -> int:
    return supervised(arguments, USAGE, load_sft_config, "tandem.trainer.run:run_sft")


def supervised(arguments: list[str], usage: str, load: Callable[..., Loaded[Any]], run: str) -> int:
    """A command that trains on examples.

    Args:
        load: its config.
        run: what trains, "module:function".
    """
    config = resolved(arguments, usage, load)
    if config is None:
        return 0
    refuse(lacking(config))
    module, function = run.split(":")
    trains: Callable[..., bool] = getattr(import_module(module), function)
    interrupted = trains(config, say=say)
    return 130 if interrupted else 0
