"""Every command's `--help`, usage errors, signals, and control characters in errors."""

import os
import re
import signal

import pytest

from tandem.cli.guide import COMMANDS, CONFIGS, guide
from tandem.cli.main import COMMANDS as KNOWN
from tandem.cli.main import main
from tandem.cli.typed import run_typed
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
    assert said.count("example:") == 1 and f"usage: tandem {command}" in said.lower()


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


def test_the_usage_lists_the_commands(printed):
    listed = [line.split()[0] for line in printed().splitlines() if line.startswith("  ")]
    assert listed == list(KNOWN)


def test_a_sigterm_is_an_interrupt(monkeypatch, typed):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("tandem.cli.train.train", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert typed("train") == (130, "", "stopped\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_unknown_command(typed):
    status, _, err = typed("trian")
    assert status == 2 and "no command 'trian'" in err


@pytest.mark.parametrize(
    ("words", "telling"),
    [
        ("export --bestt", "--bestt"), ("export", "checkpoint"), ("export a b --dtype int4", "int4"),
        ("demo --ranks two", "--ranks"), ("logs", "run"), ("stacks", "run"),
    ],
)  # fmt: skip
def test_a_command_line_that_is_not_understood(words, telling, typed):
    status, _, error = typed(*words.split())
    command = words.split()[0]
    assert status == 2 and telling in error
    assert error.startswith(f"tandem {command}: ") and error.endswith(f"tandem {command} --help\n")
    assert len(error.splitlines()) in (2, 4)


def test_an_error_shows_no_control_characters(tmp_path, refused):
    assert "\\x1b[31mred" in refused("logs", tmp_path / "\x1b[31mred")


def test_ctrl_c_ends_a_command_with_the_status_of_an_interrupt():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_typed("view", interrupted, [])
