"""`tandem node`: its errors, and the processes that it starts, signals and ends. Ray is a stand-in."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.cli.node_address import address_of, own_address
from tandem.cli.node_file import Head, HeadFile, known_token
from tandem.errors import TandemError
from tests.cli.launching import ROOT, free_port, launch, wait_for

# Print that Ray is up, start a child in its own session, and wait.
STAND_IN = """#!/bin/sh
echo "$@" > "$(dirname "$0")/words"
echo "$RAY_AUTH_MODE $(cat "$RAY_AUTH_TOKEN_PATH")" > "$(dirname "$0")/auth"
setsid sleep 1000 &
echo "Ray runtime started."
exec sleep 1000
"""


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_JOB_ID", "TANDEM_JOB_ID", "TANDEM_HEAD_FILE", "RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")


@pytest.fixture
def port() -> Iterator[int]:
    """Yield a port of this machine on which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def file(tmp_path: Path) -> HeadFile:
    return HeadFile(tmp_path / "shared" / "head.json")


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "ray"
    path.parent.mkdir()
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return path


@pytest.fixture
def head_words(file: HeadFile) -> list[str]:
    return ["--head-file", str(file.path), "--address", "127.0.0.1"]


def _ended(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def _launched(*given: str | Path | int, **environment: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(launch(*given, **environment), stdout=subprocess.PIPE, text=True) as launcher:
        yield launcher


def _sentence(rank: int | None, *words: str, ray: str = "ray", **environment: str) -> str:
    """Return the error that the command prints when it exits with status 1."""
    done = _ended(launch(ray, rank, *words, **environment))
    assert done.returncode == 1
    assert done.stderr.startswith("tandem node: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("tandem node: ").strip()


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("RANK", None, ""),
        ("RANK", "-1", "0 to 1000000"),
        *(("MASTER_PORT", v, "1 to 65535") for v in ("ssh", "65536")),
    ],
)
def test_what_the_environment_must_say(name, value, bounds, monkeypatch):
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    said = _sentence(None)
    assert f"environment variable {name} is {'not set' if value is None else repr(value)};" in said
    assert said.endswith(bounds)


def test_without_ray(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    assert "pip install 'tandem[ray]'" in _sentence(1, ray="none", PATH=str(tmp_path))


def test_a_port_in_use(port, file, head_words):
    assert f"MASTER_PORT {port} is in use" in _sentence(0, *head_words, MASTER_PORT=str(port))
    assert not file.token_path.exists()


@pytest.mark.parametrize("kind", ["head", "notes"])
def test_the_head_takes_neither_a_living_heads_file_nor_another_kind_of_file(kind, port, file):
    if kind == "head":
        file.write(Head("127.0.0.1", port, None, "a"))
    else:
        file.path.parent.mkdir()
        file.path.write_text("my notes")
    before = file.path.read_bytes()
    telling = {"head": f"names the head 127.0.0.1:{port}, which answers", "notes": "holds 'my notes'"}
    assert _sentence(0, "--head-file", str(file.path)).startswith(f"{file.path} {telling[kind]}")
    assert file.path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "does not exist"),
        ("10.0.0.1\n", "holds '10.0.0.1\\n'"),
        ({"job": "41"}, "names the head 127.0.0.1:{port} of job 41, but this is job 42"),
        ({"job": "42", "port": 1}, "names the head 127.0.0.1:1 of job 42, but nothing answers there"),
    ],
)
def test_after_the_timeout_it_says_why(text, reason, port, file):
    if isinstance(text, dict):
        file.write(Head(**{"address": "127.0.0.1", "port": port, "start": "a", **text}))
    elif text is not None:
        file.path.parent.mkdir()
        file.path.write_text(text)
    began = time.monotonic()
    said = _sentence(1, "--timeout", "2", SLURM_JOB_ID="42", TANDEM_HEAD_FILE=str(file.path))
    assert said.startswith(f"no head within 2 s: {file.path} {reason.format(port=port)}")
    assert 2 <= time.monotonic() - began < 8


def test_a_job_of_ones_own_name_comes_before_slurms(port, file):
    file.write(Head("127.0.0.1", port, "42", "a"))
    words = ["--timeout", "0", "--head-file", str(file.path)]
    said = _sentence(1, *words, SLURM_JOB_ID="42", TANDEM_JOB_ID="mine")
    assert said.endswith("of job 42, but this is job mine")


def test_where_job_names_are_unknown_a_living_head_will_do(port, file):
    for written, asked in ((None, "42"), ("42", None)):
        head = Head("127.0.0.1", port, written, "a")
        file.write(head)
        assert file.living(asked) == (head, "")


def test_nobody_else_may_read_the_token(file):
    file.write_token("secret")
    assert stat.S_IMODE(file.token_path.stat().st_mode) == 0o600
    assert [path.name for path in file.path.parent.iterdir()] == ["head.json.token"]
    file.remove()
    assert list(file.path.parent.iterdir()) == []


def test_the_users_own_token_is_taken_from_where_ray_looks(tmp_path):
    default = Path.home() / ".ray" / "auth_token"
    assert len(known_token({})) == 64
    assert known_token({}) != known_token({})
    default.parent.mkdir(parents=True)
    default.write_text("default\n")
    assert known_token({}) == "default"
    (tmp_path / "token").write_text("named")
    assert known_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}) == "named"
    assert known_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "RAY_AUTH_TOKEN": "given"}) == "given"


def test_addresses():
    assert address_of("lo") == "127.0.0.1"
    assert own_address("lo") == "127.0.0.1"
    assert own_address(None, towards="127.0.0.1") == "127.0.0.1"
    with pytest.raises(TandemError, match=r"no interface 'eth77' has an IPv4 address here; .* lo \(127"):
        own_address("eth77")


STRAY = """
import os, sys
from tandem.cli.node_processes import Processes
folder = sys.argv[1]
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
with Processes() as processes:
    script = f"setsid {sys.executable} -c '{deaf}' > {folder}/up & echo $! > {folder}/pid"
    child = processes.start(["sh", "-c", script], os.environ)
    assert child.wait(timeout=10) == 0
    while not os.path.exists(f"{folder}/up") or open(f"{folder}/up").read() != "1\\n":
        processes.pause(0.1)
    os.kill(int(open(f"{folder}/pid").read()), 0)
"""


def test_the_end_leaves_nothing_behind(tmp_path):
    """A process that left its parent, group and session, and ignores signals, ends too."""
    subprocess.run([sys.executable, "-c", STRAY, str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_command_that_does_not_exist(stand_in, file, head_words):
    said = _sentence(0, *head_words, "--", "no-such", ray=str(stand_in), MASTER_PORT=free_port())
    assert said.startswith("'no-such' cannot be run (No such file")
    assert list(file.path.parent.iterdir()) == []


def test_the_head_runs_a_command_and_ends_with_its_status(stand_in, file, head_words):
    port = free_port()
    told = 'cat "$0"; echo; stat -c %a "$0.token"; echo "$RAY_ADDRESS"; cat "$RAY_AUTH_TOKEN_PATH"; exit 7'
    words = [*head_words, "--num-cpus", "3", "--ray=--memory=9", "--", "sh", "-c", told, str(file.path)]
    done = _ended(launch(stand_in, 0, *words, MASTER_PORT=port, SLURM_JOB_ID="5"))
    assert done.returncode == 7, done.stderr
    first, *_, mode, address, last = done.stdout.splitlines()
    token, _, _ = last.partition("node 0:")
    assert f"127.0.0.1:{port}" in first and str(file.path) in first
    written = json.loads(done.stdout[done.stdout.index("{") : done.stdout.index("}") + 1])
    assert (written["address"], written["port"], written["job"]) == ("127.0.0.1", int(port), "5")
    assert (mode, address, len(token)) == ("600", f"127.0.0.1:{port}", 64)
    assert (stand_in.parent / "auth").read_text() == f"token {token}\n"
    ray = "start --block --log-color=false --num-cpus=3 --memory=9 --head"
    words_of_ray = (stand_in.parent / "words").read_text()
    assert words_of_ray == f"{ray} --port={port} --node-ip-address=127.0.0.1\n"
    assert list(file.path.parent.iterdir()) == []


def test_signals_reach_the_command_once(stand_in, head_words, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True))\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('term', flush=True), sys.exit(5)))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    words = [*head_words, "--", sys.executable, str(program)]
    with _launched(stand_in, 0, *words, MASTER_PORT=free_port()) as launcher:
        said = [next(line for line in launcher.stdout if line == "ready\n")]
        launcher.send_signal(signal.SIGUSR1)
        said.append(launcher.stdout.readline())
        launcher.send_signal(signal.SIGTERM)
        said += launcher.stdout.readlines()
        assert launcher.wait(timeout=30) == 5
    assert said[:3] == ["ready\n", "usr1\n", "term\n"] and len(said) == 4 and "status 5" in said[3]


def test_without_a_command_the_head_stays_until_a_signal(stand_in, file, head_words):
    port = free_port()
    with _launched(stand_in, 0, *head_words, MASTER_PORT=port) as launcher:
        launcher.stdout.readline()
        told = f"RAY_ADDRESS=127.0.0.1:{port} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={file.token_path}\n"
        assert launcher.stdout.readline().endswith(f": export {told}")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=30) == 0
    assert not file.path.exists()


@pytest.fixture
def head(file: HeadFile, port: int) -> Head:
    """Write and return a head that answers."""
    head = Head("127.0.0.1", port, None, "a")
    file.write(head)
    return head


@pytest.mark.slow
def test_a_follower_leaves_the_head_time_to_end_first(stand_in, file, head):
    with _launched(stand_in, 1, "--head-file", str(file.path), "--grace", "3") as launcher:
        assert launcher.stdout.readline() == f"node 1: 127.0.0.1 has joined {head}\n"
        launcher.send_signal(signal.SIGUSR1)
        launcher.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert launcher.stdout.readline() == f"node 1: leaving {head} when it ends, or after 3 s\n"
        assert launcher.wait(timeout=30) == 0
        assert 2.9 < time.monotonic() - began < 10


def test_a_second_signal_ends_a_follower_at_once(stand_in, file, head):
    with _launched(stand_in, 1, "--head-file", str(file.path)) as launcher:
        launcher.stdout.readline()
        for word in ("when it ends, or after 120 s", "now"):
            launcher.send_signal(signal.SIGINT)
            assert launcher.stdout.readline() == f"node 1: leaving {head} {word}\n"
        assert launcher.wait(timeout=30) == 0


@pytest.mark.slow
def test_a_follower_tries_again_until_the_time_is_over(stand_in, file, head):
    stand_in.write_text("#!/bin/sh\necho no room\nexit 1\n")
    done = _ended(launch(stand_in, 1, "--head-file", str(file.path), "--timeout", "2"))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and lines[1::2] == ["no room"] * 2
    assert all(str(head) in line for line in lines[::2])
    assert "within 2 s" in done.stderr and done.stderr.endswith(f" {head}\n")


def test_a_head_that_ends_before_a_follower_has_joined(stand_in, file):
    stand_in.write_text(f"#!/bin/sh\ntouch {stand_in}.up\nexec sleep 1000\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        file.write(Head("127.0.0.1", server.getsockname()[1], None, "a"))
        follower = subprocess.Popen(launch(stand_in, 1, "--head-file", str(file.path)))
        wait_for(Path(f"{stand_in}.up").exists)
        file.remove()
    assert follower.wait(timeout=30) == 0


def test_a_ray_that_ends_too_early(stand_in, head_words):
    stand_in.write_text("#!/bin/sh\necho one\necho two\nexit 3\n")
    done = _ended(launch(stand_in, 0, *head_words, MASTER_PORT=free_port()))
    assert done.returncode == 1
    assert "did not start on 127.0.0.1" in done.stderr and done.stderr.endswith("\none\ntwo\n")
