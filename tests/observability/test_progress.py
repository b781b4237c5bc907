import io
import re
import time

from rich.console import Console

from tandem.observability import progress
from tandem.observability.progress import Progress

LINE = re.compile(r"work: (\d+)/8 samples in \d+ s, ([\d,]+) tokens/s")


def shown(text):
    """Return the numbers of finished samples, line by line."""
    matches = [LINE.fullmatch(line) for line in text.getvalue().splitlines()]
    assert None not in matches, text.getvalue()
    return [int(match[1]) for match in matches]


def test_lines_come_while_nothing_is_finished_and_none_after_the_end(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.2)
    text = io.StringIO()
    with Progress("work", 8, done=3, console=Console(file=text, width=20)) as counted:
        time.sleep(0.5)
        waiting = shown(text)
        counted.advance(5, 100)
    ended = shown(text)
    time.sleep(0.3)
    assert 1 <= len(waiting) <= 2 and set(waiting) == {3}
    assert ended[-1] == 8 and len(ended) <= len(waiting) + 2
    assert shown(text) == ended


def test_a_short_piece_of_work_is_one_line_and_a_terminal_shows_a_bar_at_once():
    text, terminal = io.StringIO(), io.StringIO()
    with Progress("work", 8, console=Console(file=text)) as counted:
        for _ in range(8):
            counted.advance(1, 10)
    assert shown(text) == [8]
    with Progress("work", 8, console=Console(file=terminal, force_terminal=True, width=100)):
        first = terminal.getvalue()
    assert "work" in first and "0/8" in first and "0:00:00" in first


def test_an_error_ends_the_lines(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.05)
    text = io.StringIO()
    counted = Progress("work", 8, console=Console(file=text))
    counted.__enter__().advance(2, 10)
    counted.__exit__(RuntimeError, RuntimeError(), None)
    assert shown(text)[-1] == 2
    ended = text.getvalue()
    time.sleep(0.15)
    assert text.getvalue() == ended
