import subprocess
import sys

from tandem.observability.files import append_line, whole_lines
from tandem.observability.terminal import printable, say

WRITER = """
import sys
from pathlib import Path
from tandem.observability.files import append_line
for i in range(200):
    append_line(Path(sys.argv[1]), f"{sys.argv[2]} {i} " + "x" * (37 * i % 500), header="[")
"""


def test_lines_of_many_processes_stay_whole(tmp_path):
    path = tmp_path / "lines"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)]) for n in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    first, *lines = whole_lines(path)
    assert first == "["
    assert len(lines) == 800
    for n in range(4):
        mine = [line.split(" ") for line in lines if line.startswith(f"{n} ")]
        assert [(int(i), len(x)) for _, i, x in mine] == [(i, 37 * i % 500) for i in range(200)]


def test_a_torn_line_is_cut_off_once(tmp_path):
    path = tmp_path / "lines"
    path.write_text("whole\ntor")
    append_line(path, "next", header="[")
    append_line(path, "last")
    assert path.read_text() == "whole\nnext\nlast\n"
    path.write_text("torn from the start")
    append_line(path, "first", header="[")
    assert path.read_text() == "[\nfirst\n"


NASTY = "\x1b[31m\x9b2J\x07\r\u202e[/bold]\ud800"


def test_what_a_terminal_would_obey_is_written_out(capsys):
    shown = printable(NASTY)
    assert shown == "\\x1b[31m\\x9b2J\\x07\\r\\u202e[/bold]\\ud800"
    assert printable(shown) == shown
    assert printable("ü\n\tπ 👩‍🔬 مرحبا") == "ü\n\tπ 👩‍🔬 مرحبا"
    say(NASTY)
    assert capsys.readouterr().out == shown + "\n"
