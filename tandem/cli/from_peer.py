"""The commands `tandem from-trl` and `tandem from-openrlhf`.

The commands convert another system's settings to a config.
"""

from __future__ import annotations

from inspect import getdoc
from pathlib import Path

from tandem.cli.typed import UsageError, valued, worded
from tandem.config.schema import nested
from tandem.config.sources import to_yaml
from tandem.errors import ConfigError
from tandem.migrate.openrlhf import MODULE, migrate_openrlhf
from tandem.migrate.peer import Peer
from tandem.migrate.script import Script
from tandem.migrate.table import print_table
from tandem.migrate.trl import migrate
from tandem.migrate.trl_source import read_python, read_words
from tandem.observability.terminal import say, warn
from tandem.peers.table import Reading

REFUSED = 3
"""The exit status if settings are refused, so that the config is not equivalent."""


@worded
def from_trl(arguments: list[str]) -> int:
    """Turn TRL's settings into a config.

    usage: tandem from-trl FILE.py [--devices N] [-o CONFIG.yaml]
           tandem from-trl [trl] grpo|rloo|sft|reward --name value … [--devices N] [-o CONFIG.yaml]

    A table shows what each given setting became. FILE.py is read and never run; settings whose values are
    not literals are listed. The exit status is 3 if a given setting is refused: the config is then written
    without it.
      --devices N   number of processes that TRL runs on, which determines its batch sizes; default: 1
      -o FILE       file for the config; default: standard output
    """
    if not arguments:
        print(getdoc(from_trl))
        return 2
    words, own = valued(arguments, ("--devices", "-o"))
    devices = own.get("--devices", "1")
    given = read_python(words[0]) if words and words[0].endswith(".py") else read_words(words)
    if not devices.isdecimal() or int(devices) < 1:
        raise UsageError("must be a whole number of at least 1", field="--devices", got=devices)
    made = migrate(given.name, given.settings, devices=int(devices), implied=given.implied)
    for name, text in given.unread.items():
        if name in DATA_SETS:
            made.rows.append(Reading(name, text, "renamed", f"{DATA_SETS[name]}: write the data as parquet"))
        else:
            made.rows.append(
                Reading(name, text, "refused", "the value is not a literal: set the key yourself")
            )
    return _write(made, own.get("-o"))


DATA_SETS = {"train_dataset": "data.train_files", "eval_dataset": "data.val_files"}
"""Arguments of TRL's trainers that take data, which a file of settings cannot contain."""


@worded
def from_openrlhf(arguments: list[str]) -> int:
    """Turn OpenRLHF's options into a config.

    usage: tandem from-openrlhf --name value … [-o CONFIG.yaml]
           tandem from-openrlhf SCRIPT.sh [ARGUMENTS…] [-o CONFIG.yaml]

    The options are those of OpenRLHF's `openrlhf.cli.train_ppo_ray`. A table shows what each given option
    became. bash reads a shell script with the trainer replaced; only programs that print are run. The exit
    status is 3 if a given option is refused: the config is then written without it.
      -o FILE       file for the config; default: standard output
    """
    if not arguments:
        print(getdoc(from_openrlhf))
        return 2
    words, own = valued(arguments, ("--devices", "-o"))
    if words and words[0].endswith(".sh"):
        words = list(Script.read(words[0], words[1:]).call(trainer=MODULE).words)
    return _write(migrate_openrlhf(words), own.get("-o"))


def _write(made: Peer, path: str | None) -> int:
    """Write the config, print the translation of each setting, and return the exit status."""
    print_table("settings", made.rows)
    for note in (*made.notes, *made.lost):
        warn(f"note: {note}")
    text = to_yaml(nested(made.config))
    if path is None:
        say(text, end="")
    else:
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError("cannot be written", field="-o", got=str(error)) from error
    file = path or "CONFIG.yaml"
    flag = "" if made.command == "train" else f"--{made.command} "
    warn(f"next: fill in the paths, then run `tandem check {flag}{file}` and `tandem {made.command} {file}`")
    refused = sorted({row.name for row in made.rows if row.verdict == "refused"})
    if refused:
        warn(f"refused, so the config lacks them: {', '.join(refused)} (exit status {REFUSED})")
    return REFUSED if refused else 0
