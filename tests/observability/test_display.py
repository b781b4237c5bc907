import fcntl
import io
import json
import logging
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyte
import pytest

from tandem.observability.display import Picture, Screen, show_until_end, sparkline
from tandem.observability.run import read_metrics
from tests.support.warm import WarmProcess

LIMIT_S = 120.0
_OLD = logging.StreamHandler(sys.stderr)  # like that of a library that was imported before the run


def on_step(step, metrics):
    """Print in four ways at each step of a run, and wait until the terminal shows the text."""
    print(f"print {step} " + "x" * 100 + f" {step} end")
    sys.stderr.write(f"error {step}\n")
    os.write(1, f"raw {step}\n".encode())
    _OLD.stream = sys.__stderr__ or sys.stderr
    _OLD.emit(logging.makeLogRecord({"msg": f"log {step}"}))
    wait_for(Path(os.environ["SEEN"], str(step)).exists)


def wait_for(seen):
    deadline = time.monotonic() + LIMIT_S
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Terminal:
    """A pseudo-terminal with a process on it, and the text that it shows."""

    def __init__(self, words: list[Any], columns: int, **environment: str) -> None:
        self.ours, theirs = pty.openpty()
        self.screen = pyte.HistoryScreen(columns, 30, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.resize(columns)
        plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
        own = {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environment}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = WarmProcess([sys.executable, *words], env=plain | own, **streams)
        os.close(theirs)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.screen.resize(columns=columns)

    def read(self) -> bool:
        """Read available output; return whether more may come."""
        if select.select([self.ours], [], [], 0.05)[0]:
            try:
                new = os.read(self.ours, 1 << 16)
            except OSError:  # the other side is closed
                return False
            self.raw += new
            self._stream.feed(new)
        return True

    def until(self, shown: Callable[[], bool]) -> None:
        def seen() -> bool:
            assert self.read(), self.text
            return shown()

        wait_for(seen)

    def end(self) -> int:
        wait_for(lambda: not self.read())
        return self.process.wait(timeout=LIMIT_S)

    @property
    def rows(self) -> list[str]:
        """Return the lines that were scrolled away and those on the screen."""
        above = ["".join(row[column].data for column in sorted(row)) for row in self.screen.history.top]
        return [row.rstrip() for row in (*above, *self.screen.display)]

    @property
    def text(self) -> str:
        return "\n".join(self.rows)

    @property
    def picture(self) -> dict[str, str]:
        """Return the lines of the picture by label; empty if there is no picture at the bottom."""
        rows = self.rows
        begins = [number for number, row in enumerate(rows) if row.startswith("──")]
        return dict((row[:12].strip(), row[13:]) for row in rows[begins[-1] + 1 :] if row) if begins else {}


@contextmanager
def on_terminal(words, columns=100, **environment):
    terminal = Terminal(words, columns, **environment)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait(timeout=LIMIT_S)
        os.close(terminal.ours)


@pytest.mark.parametrize("told", [True, False])
def test_the_picture_goes_where_the_run_wants_the_terminal_back_and_ends_at_once(told):
    terminal, ended = io.BytesIO(), threading.Event()
    screen = Screen(terminal)
    screen.show(b"", b"picture\n")
    if told:
        ended.set()
    printed, into = os.pipe()
    os.close(into)
    show_until_end(Picture(Path(), 0, 1, os.getpid()), printed, screen, ended)
    os.close(printed)
    assert terminal.getvalue() == b"picture\n" + (b"\x1b[1F\x1b[J" if told else b"")


@pytest.mark.slow
def test_a_run_shows_its_values_below_what_is_printed_and_gives_the_terminal_back(lab, tmp_path):
    run = tmp_path / "run"
    more = {
        "trainer__logger": "[console]",
        "trainer__on_step": f"{__file__}:on_step",
        "trainer__test_freq": 2,
    }
    words = lab.overrides(run, data__val_files=lab.val, trainer__total_training_steps=9, **more)
    with on_terminal(["-m", "tandem", "train", *words], SEEN=str(tmp_path)) as terminal:
        for step in (1, 2, 3):
            terminal.until(lambda step=step: f"log {step}" in terminal.text)
            row = read_metrics(run / "metrics.jsonl")[-1]
            assert row["step"] == step
            speed = f"{row['perf/step_tokens_per_s']:,.0f} tokens/s"
            terminal.until(lambda speed=speed: terminal.picture.get("speed") == speed)
            shown = terminal.picture
            assert shown["reward"].split()[0] == f"{row['reward/mean']:.3f}"
            assert len(shown["reward"].split()[1]) == step
            assert shown["step"].startswith(f"{step} of 9")
            assert shown["mismatch"].startswith(f"{row['rollout/log_prob_diff_mean']:.2g} nats")
            assert max(map(len, terminal.screen.display)) <= terminal.screen.columns
            assert "resident" in shown["memory"]
            assert not terminal.screen.cursor.hidden and terminal.screen.cursor.x == 0
            terminal.resize(40 if step == 1 else 100)
            (tmp_path / str(step)).touch()
        assert "val/accuracy" in terminal.picture
        terminal.until(lambda: "log 4" in terminal.text)
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.until(lambda: "interrupted: " in terminal.text)
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.end() == 130
        begins = next(number for number, row in enumerate(terminal.rows) if row.startswith("print 4 "))
        assert not any(row.startswith("──") for row in terminal.rows[begins:])
        for step in (1, 2, 3, 4):
            assert terminal.raw.count(b"print %d %s %d end\r\n" % (step, b"x" * 100, step)) == 1
            for way in ("error", "raw", "log"):
                assert terminal.rows.count(f"{way} {step}") == 1, terminal.text
        assert "stopped" in terminal.rows
        assert terminal.screen.cursor.x == 0 and not terminal.screen.cursor.hidden
        assert b"\x1b[?25l" not in terminal.raw


PROGRAM = """
import os, signal, sys
from pathlib import Path
from tandem.observability.sinks import RunInfo
from tandem.observability.sinks.live import console_sink
folder, what = Path(sys.argv[1]), sys.argv[2]
sink = console_sink(RunInfo("tandem", "test", folder, total_steps=3))
print("begins")
if what == "dies":
    os.write(2, b"last words\\n")
    os.kill(os.getpid(), signal.SIGKILL)
if what == "alone":
    sink._process.kill()
    assert sink._restored.wait(60)
sink.log(1, {"reward/mean": 0.5})
sink.log(3, {"reward/mean": 0.75})
sink.close()
print("after")
"""
LINES = ["begins", "step 1/3", "step 3/3", "after"]


def lines(text):
    return [row.partition("  ")[0] for row in text.splitlines() if row]


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [path, tmp_path]


@pytest.mark.parametrize(
    ("what", "environment"), [("plain", {"NO_COLOR": "1"}), ("plain", {"TERM": "dumb"}), ("alone", {})]
)
def test_without_a_display_a_terminal_gets_lines(program, what, environment):
    """With "alone", the display is killed."""
    with on_terminal([*program, what], **environment) as terminal:
        assert terminal.end() == 0
        assert what == "alone" or b"\x1b" not in terminal.raw
        assert lines(terminal.text) == LINES


def test_what_is_no_terminal_gets_lines(program):
    words, environment = [sys.executable, *program, "plain"], os.environ | {"FORCE_COLOR": "1"}
    with WarmProcess(words, stdout=subprocess.PIPE, env=environment) as process:
        assert lines(process.communicate(timeout=LIMIT_S)[0].decode()) == LINES


def test_the_last_words_of_a_run_that_is_killed_are_on_the_terminal(program):
    with on_terminal([*program, "dies"]) as terminal:
        assert terminal.end() == -signal.SIGKILL
        assert lines(terminal.text)[:2] == ["begins", "last words"]
        assert terminal.screen.cursor.x == 0 and not terminal.screen.cursor.hidden


def test_no_picture_below_a_line_without_its_end():
    screen = pyte.Screen(20, 6)
    stream = pyte.ByteStream(screen)
    stream.listener = screen
    out = io.BytesIO()
    shown = Screen(out)
    picture = b"-- run\r\nstep 1\r\n"
    expected = {
        b"one\r\n": "one/-- run/step 1", b"two\r\n": "one/two/-- run/step 1",
        b"(Pdb) ": "one/two/(Pdb)", b"": "one/two/(Pdb)",
        b"next\r\n": "one/two/(Pdb) next/-- run/step 1", b"four\r\n": "two/(Pdb) next/four/-- run/step 1",
    }  # fmt: skip
    for above, rows in expected.items():
        shown.show(above, picture)
        stream.feed(out.getvalue())
        out.seek(out.truncate(0))
        assert "/".join(row.rstrip() for row in screen.display if row.strip()) == rows
    written = len(out.getvalue())
    shown.show(b"", picture)  # the same again
    assert len(out.getvalue()) == written


GIB = 2**30


def begun(track, name, ago, **details):
    return {"name": name, "ph": "B", "ts": (time.time() - ago) * 1e6, "tid": track, "args": details}


def named(track, name):
    return {"name": "thread_name", "ph": "M", "tid": track, "args": {"name": name}}


def test_the_picture_of_a_folder(tmp_path):
    always = {"perf/memory_predicted_bytes/ref": 2.0 * GIB, "actor/kl": None}
    metrics = [{"step": step, "reward/mean": step / 8, **always} for step in range(1, 61)]
    metrics[-1] |= {"rollout/log_prob_diff_mean": 0.25, "rollout/log_prob_diff_limit": 0.01}
    sizes = {"peak_bytes/ref": 1.5, "peak_bytes/update_actor": 9.0, "predicted_bytes/update_actor": 8.0}
    metrics[-1] |= {f"perf/memory_{name}": size * GIB for name, size in sizes.items()}
    hostile = "reads \x1b[2Jthis\u202e\nand that " + "on and on " * 20
    events = [
        {"event": "warning", "name": "old", "step": 2, "text": "of the start before"},
        {"event": "start", "step": 0, "total_steps": 100},
        {"event": "warning", "name": "new", "step": 59, "text": hostile},
    ]
    phases = [
        named(1, "actor rank 0"),
        begun(1, "update_actor", 9000.0),  # from a run that was killed
        *(named(2, "actor rank 0"), named(3, "actor rank 1"), named(4, "critic rank 0")),
        named(9, "controller"),
        begun(9, "step", 70.0, step=61),
        *(begun(2, "gen", 65.0), begun(2, "generate_sequences", 62.2), begun(3, "generate_sequences", 61.0)),
        begun(4, "update_critic", 5.2),
    ]
    for name, rows in (("metrics.jsonl", metrics), ("events.jsonl", events)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "timeline.json").write_text("[\n" + "".join(json.dumps(row) + ",\n" for row in phases))
    picture = Picture(tmp_path, 40, 100, os.getpid())
    picture.look()
    wide = [line.plain for line in picture.lines(200)]
    rows = {line[:12].strip(): line[13:] for line in wide[1:]}
    assert list(rows) == ["step", "now", "reward", "mismatch", "memory", "warning"]
    assert rows["step"].startswith("61 of 100  ") and rows["step"].count("━") == 40
    assert rows["now"] == "generate_sequences (actor) 1 min 02 s, update_critic (critic) 5 s"
    values = [step / 8 for step in range(21, 61)]
    assert rows["reward"] == f"7.500     {sparkline(values)}"
    assert rows["mismatch"] == "0.25 nats of 0.01 allowed"
    assert rows["memory"] == "9.00 GiB of 8.00 GiB planned, in update_actor"
    assert rows["warning"].startswith("step 59: reads \\x1b[2Jthis\\u202e and that on")
    narrow = picture.lines(40)
    assert [line.cell_len <= 40 for line in narrow] == [True] * 7
    assert narrow[3].plain.startswith("reward       7.500     ") and narrow[3].plain.endswith("█")
    assert narrow[6].plain.endswith("…")


def test_sparklines_go_from_the_least_to_the_greatest():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([-7.0, 0.0, -6.0]) == "▁█▂"
