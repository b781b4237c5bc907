"""Every command's `--help`, usage errors, signals, streams, locales and paths of the wrong kind."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tandem.cli.guide import COMMANDS, CONFIGS, guide
from tandem.cli.main import COMMANDS as KNOWN
from tandem.cli.main import main
from tandem.cli.typed import run_typed
from tandem.config.schema import keys
from tests.support.marks import slow_but


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
    assert status == 2 and "no command 'trian'" in err and "did you mean train?" in err


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


TANDEM = (sys.executable, "-m", "tandem")


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash, in which `$T` is the command."""
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, "T": " ".join(TANDEM), **variables},
    )


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("$T config show >&-", 1),
        ("$T config show >/dev/full", 1),
        ("$T config show >/dev/full 2>&1", 1),
        ("$T config show | (exec <&-; sleep 2); exit ${PIPESTATUS[0]}", 141),
        ("$T config explain trainer.project_name 2>&-", 0),
        ("$T runs /no/such/folder 2>&-", 1),
        ("$T runs /no/such/folder 2>/dev/full", 1),
        ("$T nothing >&- 2>&-", 2),
        ("$T config explain trainer.project_name <&-", 0),
    ],
)
def test_streams_that_cannot_be_used(line, status):
    done = shell(line)
    assert done.returncode == status, done.stderr
    assert b"Traceback" not in done.stderr
    if status == 1 and "2>" not in line:
        assert b"standard output" in done.stderr


@pytest.mark.parametrize("variables", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}])
def test_an_accent_in_any_locale(tmp_path, variables):
    """The accent is in a path, a config and a value, and is printed on both streams."""
    config = tmp_path / "été.yaml"
    config.write_text("trainer: {naïve: 1}\n", encoding="utf-8")
    done = shell(f"$T config show {config} trainer.œuvre=2", **variables)
    assert done.returncode == 1
    assert {"trainer.naïve", "trainer.œuvre"} <= {
        line.split(":")[0].strip() for line in done.stderr.decode().splitlines()
    }


@pytest.mark.parametrize("command", slow_but({"check --model"}, ["export", "generate", "check --model"]))
def test_a_signal_in_the_first_second(command, tmp_path):
    """The signal arrives during imports. The first 0.1 s belongs to the interpreter."""
    for sent, wait in ((signal.SIGINT, 0.4), (signal.SIGTERM, 0.7), (signal.SIGINT, 1.0)):
        words = [*command.split(), "model.path=x"] if command == "generate" else [*command.split(), "a", "b"]
        process = subprocess.Popen([*TANDEM, *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        time.sleep(wait)
        process.send_signal(sent)
        _, said = process.communicate(timeout=60)
        assert "Traceback" not in said
        assert (process.returncode, said) == (130, "stopped\n") or process.returncode in (1, 2)


def test_an_interrupt_within_exec_has_its_exit_status(tmp_path):
    (tmp_path / "interrupted.py").write_text(
        "import sys\nfrom tandem.cli.process import outcome\n"
        "sys.exit(outcome([], lambda words: exec('raise KeyboardInterrupt')))\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "interrupted"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 130


@pytest.mark.parametrize(
    "words",
    ["export {folder} {file}", "export {folder} {folder}/out", "export {file} {folder}/out", "samples {file}",
     "samples {folder}", "runs {file}", "replay {file}", "replay {folder}", "stacks {file}", "logs {file}",
     "config show {folder}", "data validate {folder}/none", "bench compare {file} {folder}"],
)  # fmt: skip
def test_paths_of_the_wrong_kind(words, tmp_path, typed):
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    status, out, err = typed(*words.format(folder=tmp_path, file=file).split())
    assert status in (1, 2) and "Traceback" not in err
    assert str(tmp_path) in err + out
