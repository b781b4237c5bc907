"""`tandem from-trl` and `tandem from-openrlhf`: another system's settings as a config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem.cli.typed import UsageError
from tandem.config.schema import nested
from tandem.config.sources import to_yaml
from tandem.errors import ConfigError
from tandem.migrate.openrlhf import MODULE, migrate_openrlhf
from tandem.migrate.script import Script
from tandem.migrate.table import print_table
from tandem.migrate.trl import Migrated, migrate
from tandem.migrate.trl_source import read_python, read_words
from tandem.observability.terminal import say, warn
from tandem.peers.table import Reading

REFUSED = 3
"""Exit status where settings are refused: what is trained is not quite what was asked for."""

TRL_USAGE = """usage: tandem from-trl FILE.py [--devices N] [-o CONFIG.yaml]
       tandem from-trl [trl] grpo|rloo|sft|reward --name value … [--devices N] [-o CONFIG.yaml]

Writes the config that TRL's settings become, and says of each given one what it is here. FILE.py is read,
never run: what is no literal in it is named. Exit status 3 where a given setting is refused: the config is
written, and does without it.
  --devices N   processes that TRL runs on, by which its batch sizes count; 1 unless given
  -o FILE       where to; standard output unless given"""


def from_trl(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(TRL_USAGE)
        return 0 if arguments else 2
    words, own = _own(arguments)
    given = read_python(words[0]) if words and words[0].endswith(".py") else read_words(words)
    made = migrate(given.name, given.settings, devices=_devices(own), implied=given.implied)
    for name, text in given.unread.items():
        if name in DATA_SETS:
            made.rows.append(Reading(name, text, "renamed", f"{DATA_SETS[name]}: to be written as parquet"))
        else:
            made.rows.append(Reading(name, text, "refused", "no literal: set its key"))
    return _write(made, own.get("-o"))


DATA_SETS = {"train_dataset": "data.train_files", "eval_dataset": "data.val_files"}
"""Arguments of TRL's trainers that are data, which no file of settings holds."""

OPENRLHF_USAGE = """usage: tandem from-openrlhf --name value … [-o CONFIG.yaml]
       tandem from-openrlhf SCRIPT.sh [ARGUMENTS…] [-o CONFIG.yaml]

Writes the config that the options of OpenRLHF's `openrlhf.cli.train_ppo_ray` become, and says of each given
one what it is here. A shell script is read by bash with the trainer replaced; only programs that print run.
Exit status 3 where a given option is refused: the config is written, and does without it.
  -o FILE       where to; standard output unless given"""


def from_openrlhf(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(OPENRLHF_USAGE)
        return 0 if arguments else 2
    words, own = _own(arguments)
    if words and words[0].endswith(".sh"):
        with Script(words[0], words[1:], trainer=MODULE) as script:
            words = list(script.reach().words)
    return _write(migrate_openrlhf(words), own.get("-o"))


def _own(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The other system's words, and our own options."""
    rest, own, left = [], {}, list(arguments)
    while left:
        word = left.pop(0)
        if word not in ("--devices", "-o"):
            rest.append(word)
        elif left:
            own[word] = left.pop(0)
        else:
            raise UsageError("an option without its value", got=word)
    return rest, own


def _devices(own: dict[str, str]) -> int:
    text = own.get("--devices", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UsageError("not a number of devices", field="--devices", got=text)
    return int(text)


def _write(made: Migrated, path: str | None) -> int:
    """Writes the config and says what became of the settings; the exit status."""
    print_table("settings", made.rows)
    for note in made.notes:
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
    warn(
        "to be filled in: paths; then "
        f"`tandem check {_flag(made.command)}{file}`, `tandem {made.command} {file}`"
    )
    refused = sorted({row.name for row in made.rows if row.verdict == "refused"})
    if refused:
        warn(f"refused, so the config does without: {', '.join(refused)} (exit status {REFUSED})")
    return REFUSED if refused else 0


def _flag(command: str) -> str:
    return "" if command == "train" else f"--{command} "
