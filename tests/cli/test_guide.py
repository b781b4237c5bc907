"""The first part of each command's `--help`."""

import re

import pytest

from tandem.cli.guide import COMMANDS, CONFIGS, guide
from tandem.cli.main import COMMANDS as KNOWN
from tandem.cli.main import main
from tandem.config.schema import keys


@pytest.mark.parametrize("command", sorted(KNOWN))
def test_help_begins_with_an_example(command, capsys):
    try:
        status = main([command, "--help"])
    except SystemExit as end:  # of argparse
        status = int(end.code or 0)
    assert status == 0
    said = capsys.readouterr().out
    assert said.startswith(f"example:\n  {COMMANDS[command]}\n")
    assert said.count("example:") == 1 and "usage: tandem" in said.lower()


@pytest.mark.parametrize("command", sorted(CONFIGS))
def test_the_keys_of_an_example_exist_and_those_that_matter_are_shown(command):
    known, named = keys(CONFIGS[command][0]), CONFIGS[command][1]
    assert set(re.findall(r"([\w.]+)=", COMMANDS[command])) <= known.keys()
    assert 10 <= len(named) <= 12
    shown = re.findall(r"^  ([\w.]+)=(\S+)\n      (.+)$", guide(command), re.M)
    assert [(name, meaning) for name, _, meaning in shown] == [
        (name, known[name].info.description) for name in named
    ]


def test_defaults_are_shown_where_there_are_any():
    assert "  actor_rollout_ref.actor.optim.lr=1e-06\n" in guide("train")
    assert "  data.train_files=…\n" in guide("train")
    assert "most important keys" not in guide("logs")
