from tandem.observability.terminal import printable, say

NASTY = "\x1b[31m\x9b2J\x07\r\u202e[/bold]\ud800"


def test_what_a_terminal_would_obey_is_written_out():
    shown = printable(NASTY)
    assert shown == "\\x1b[31m\\x9b2J\\x07\\r\\u202e[/bold]\\ud800"
    assert printable(shown) == shown
    assert printable("ü\n\tπ 👩‍🔬 مرحبا") == "ü\n\tπ 👩‍🔬 مرحبا"


def test_sentences_are_printable(capsys):
    say(NASTY)
    assert capsys.readouterr().out == printable(NASTY) + "\n"
