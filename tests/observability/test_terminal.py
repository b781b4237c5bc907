from __future__ import annotations

import io
from pathlib import Path

import pytest

from tandem.observability.sinks.base import RunInfo
from tandem.observability.sinks.console import ConsoleSink
from tandem.observability.terminal import plain_console, printable, say

NASTY = "\x1b[31m\x9b2J\x07\r\u202e[/bold]\ud800"


def test_what_a_terminal_would_obey_is_written_out() -> None:
    shown = printable(NASTY)
    assert shown == "\\x1b[31m\\x9b2J\\x07\\r\\u202e[/bold]\\ud800"
    assert printable(shown) == shown
    assert printable("ü\n\tπ 👩‍🔬 مرحبا") == "ü\n\tπ 👩‍🔬 مرحبا"


def test_sentences_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    say(NASTY)
    assert capsys.readouterr().out == printable(NASTY) + "\n"


def test_the_console_logger_takes_names_as_they_are(tmp_path: Path) -> None:
    out = io.StringIO()
    sink = ConsoleSink(RunInfo("p", "e", tmp_path, total_steps=1), plain_console(file=out, width=200))
    sink.log(1, {f"val/accuracy/{NASTY}:smile:": 0.5, f"{NASTY}/x": 1.0})
    assert f"{printable(NASTY)}:smile: 0.5" in out.getvalue()
    assert "\x1b" not in out.getvalue()
