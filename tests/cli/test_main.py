"""The command `tandem`: its subcommands, a missing subcommand and an unknown subcommand."""

from __future__ import annotations

import os
import signal

import pytest

from tandem.cli.main import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([name, "--help"])
    except SystemExit as stop:  # argparse's way
        status = int(stop.code or 0)
    assert status == 0
    assert f"tandem {name}" in capsys.readouterr().out


def test_the_usage_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert listed == list(COMMANDS)


def test_a_sigterm_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("tandem.cli.train.train", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "stopped\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert "no command 'trian'" in error and "did you mean train?" in error
