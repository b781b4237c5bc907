"""`tandem from-trl` and `tandem from-openrlhf`: another system's settings as a config."""

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
"""Exit status where settings are refused: what is trained is not quite what was asked for."""


@worded
def from_trl(arguments: list[str]) -> int:
    """usage: tandem from-trl FILE.py [--devices N] [-o CONFIG.yaml]
           tandem from-trl [trl] grpo|rloo|sft|reward --name value … [--devices N] [-o CONFIG.yaml]

    Writes the config that TRL's settings become, and says of each given one what it is here. FILE.py is read,
    never run: what is no literal in it is named. Exit status 3 where a given setting is refused: the config
    is written, and does without it.
      --devices N   processes that TRL runs on, by which its batch sizes count; 1 unless given
      -o FILE       where to; standard output unless given
    """
    if not arguments:
        print(getdoc(from_trl))
        return 2
    words, own = valued(arguments, ("--devices", "-o"))
    devices = own.get("--devices", "1")
    given = read_python(words[0]) if words and words[0].endswith(".py") else read_words(words)
    if not devices.isdecimal() or int(devices) < 1:
        raise UsageError("not a number of devices", field="--devices", got=devices)
    made = migrate(given.name, given.settings, devices=int(devices), implied=given.implied)
    for name, text in given.unread.items():
        if name in DATA_SETS:
            made.rows.append(Reading(name, text, "renamed", f"{DATA_SETS[name]}: to be written as parquet"))
        else:
            made.rows.append(Reading(name, text, "refused", "no literal: set its key"))
    return _write(made, own.get("-o"))


DATA_SETS = {"train_dataset": "data.train_files", "eval_dataset": "data.val_files"}
"""Arguments of TRL's trainers that are data, which no file of settings holds."""


@worded
def from_openrlhf(arguments: list[str]) -> int:
    """usage: tandem from-openrlhf --name value … [-o CONFIG.yaml]
           tandem from-openrlhf SCRIPT.sh [ARGUMENTS…] [-o CONFIG.yaml]

    Writes the config that the options of OpenRLHF's `openrlhf.cli.train_ppo_ray` become, and says of each
    given one what it is here. A shell script is read by bash with the trainer replaced; only programs that
    print run. Exit status 3 where a given option is refused: the config is written, and does without it.
      -o FILE       where to; standard output unless given
    """
    if not arguments:
        print(getdoc(from_openrlhf))
        return 2
    words, own = valued(arguments, ("--devices", "-o"))
    if words and words[0].endswith(".sh"):
        words = list(Script.read(words[0], words[1:]).call(trainer=MODULE).words)
    return _write(migrate_openrlhf(words), own.get("-o"))


def _write(made: Peer, path: str | None) -> int:
    """Writes the config and says what became of the settings; the exit status."""
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
    warn(f"to be filled in: paths; then `tandem check {flag}{file}`, `tandem {made.command} {file}`")
    refused = sorted({row.name for row in made.rows if row.verdict == "refused"})
    if refused:
        warn(f"refused, so the config does without: {', '.join(refused)} (exit status {REFUSED})")
    return REFUSED if refused else 0
