"""`tandem rm [CONFIG.yaml] key=value …`"""

from __future__ import annotations

from tandem.cli.sft import supervised
from tandem.config.load import load_rm_config

USAGE = """usage: tandem rm [CONFIG.yaml] key=value … [--dry-run]

Trains a reward model on preferences: columns of chosen and rejected answers.
  --dry-run   print the resolved config and stop"""


def rm(arguments: list[str]) -> int:
    return supervised(arguments, USAGE, load_rm_config, "tandem.trainer.run:run_rm")
