"""Usage errors of the commands whose options Typer reads."""

import pytest

from tandem.cli.main import main
from tandem.cli.typed import run_typed


@pytest.mark.parametrize(
    ("words", "telling"),
    [
        (["export", "--bestt"], "--bestt"),
        (["export"], "checkpoint"),
        (["export", "a", "b", "--dtype", "int4"], "int4"),
        (["demo", "--ranks", "two"], "--ranks"),
        (["logs"], "run"),
        (["stacks"], "run"),
    ],
)
def test_a_command_line_that_is_not_understood(words, telling, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tandem {words[0]}: ")
    assert telling in error
    assert error.endswith(f"tandem {words[0]} --help\n")
    assert len(error.splitlines()) in (2, 4)


def test_an_error_shows_no_control_characters(tmp_path, capsys):
    assert main(["logs", str(tmp_path / "\x1b[31mred")]) == 1
    assert "\\x1b[31mred" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_with_the_status_of_an_interrupt():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_typed("view", interrupted, [])
