import fcntl
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.sandbox import inside, local, protections
from tests.sandbox.attacks import LEFT_BEHIND, LIMITED, LOOKING, MARKING, REFUSED
from tests.sandbox.honest import HONEST

SECRET = "tandem-tests-secret"
CALLS = f"{inside.CALLS} {inside.TO_ITSELF}".split()
LISTED = CALLS[inside.ARCHITECTURES[platform.machine()][0] :: 3]
"""The numbers, on this machine, of the system calls that programs may make."""
NOBODY = 65534
SECONDS = 2.0


def environment():
    folders = [str(Path(__file__).parents[2]), *(path for path in sys.path if path.endswith("-packages"))]
    return {"PYTHONPATH": ":".join(folders), SECRET: "x", "PATH": os.environ["PATH"]}


def interpreter(user):
    """Return a Python with Tandem's packages that the user may execute; skip the test if there is none."""
    options = {"user": user, "group": user, "env": environment(), "capture_output": True}
    for path in (sys.executable, *map(str, Path("/usr/bin").glob("python3.1[0-9]"))):
        command = [path, "-c", "import os, sys, tandem.sandbox; open(os.path.realpath(sys.executable))"]
        with suppress(OSError):
            if subprocess.run(command, check=False, **options).returncode == 0:
                return path
    pytest.skip("no Python with the needed packages may be executed by this user")


class Helper:
    """A process that runs programs in sandboxes of a kind as a given user; their folders are in `scratch`.

    Where this kind of sandbox does not work, the test is skipped.
    """

    def __init__(self, user, kind):
        same = user == os.getuid()
        who = {} if same else {"user": user, "group": user, "extra_groups": []}
        self.scratch = Path(tempfile.mkdtemp(dir="/tmp", prefix="scratch-"))
        self.scratch.chmod(0o777)
        inherited = os.open(self.scratch, os.O_RDONLY)
        high = fcntl.fcntl(inherited, fcntl.F_DUPFD, 1500)
        self.process = subprocess.Popen(
            [sys.executable if same else interpreter(user), "-m", "tests.sandbox.helper", kind],
            env=environment() | {"TMPDIR": str(self.scratch)}, pass_fds=(inherited, high),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **who,
        )  # fmt: skip
        for descriptor in (inherited, high):
            os.close(descriptor)
        self.user = user
        assert self.process.stdout is not None
        if problem := json.loads(self.process.stdout.readline()):
            self.close()
            pytest.skip(problem)

    def run(self, program, seconds=SECONDS):
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([program, "", seconds]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the helper process has ended"
        return SimpleNamespace(**json.loads(line))

    def close(self):
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.scratch)


USERS = {"root": 0, "nobody": NOBODY} if os.getuid() == 0 else {"self": os.getuid()}
HELPERS = [(who, kind) for kind in ("Sandlock", "Bubblewrap") for who in USERS]


def by_helper(names):
    """Parametrize a test over all names, users and sandboxes.

    In the quick test suite, each name runs with only one pair of user and sandbox, in turn.
    """
    slow = pytest.mark.slow
    pairs = [
        pytest.param(made, name, marks=slow if turn != at % len(HELPERS) else (), id="-".join([*made, name]))
        for turn, made in enumerate(HELPERS)
        for at, name in enumerate(names)
    ]
    return pytest.mark.parametrize(("helper", "name"), pairs, indirect=["helper"])


@pytest.fixture(scope="module")
def helper(request):
    who, kind = request.param
    made = Helper(USERS[who], kind)
    yield made
    made.close()


class Field:
    """The targets of the attacks, which belong to the attacking user, and their names for the programs.

    `reached` has an entry for each time that a socket was reached.
    """

    def __init__(self, folder, user):
        folder.chmod(0o777)
        self.reached = []
        self.outside, self.target, secret = (folder / name for name in ("outside", "target", "secret"))
        self.outside.mkdir()
        for path in (self.target, secret):
            path.write_text("as it was")
        for path in (self.outside, self.target, secret):
            os.chown(path, user, -1)
        who = {} if user == os.getuid() else {"user": user, "group": user}
        self.victim = subprocess.Popen(["sleep", "1000"], start_new_session=True, **who)
        abstract = f"tandem-{folder.name}"
        self.sockets = [
            self._listen(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            self._listen(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            self._listen(socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "s")),
            self._listen(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + abstract),
            self._listen(socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "d")),
        ]
        for name in ("s", "d"):
            (folder / name).chmod(0o777)
        self.names = {
            "tcp": self.sockets[0].getsockname()[1], "udp": self.sockets[1].getsockname()[1],
            "unix": folder / "s", "datagrams": folder / "d", "abstract": abstract, "secret": secret,
            "target": self.target, "outside": self.outside, "variable": SECRET, "pid": self.victim.pid,
            "listed": [int(number) for number in LISTED if number != "-"],
        }  # fmt: skip
        self._closed = threading.Event()
        self._ears = threading.Thread(target=self._hear)
        self._ears.start()
        self.before = self.seen()

    def _listen(self, family, kind, address):
        made = socket.socket(family, kind)
        made.bind(address)
        if kind == socket.SOCK_STREAM:
            made.listen()
        return made

    def _hear(self):
        """Record everything that reaches a socket, until the targets are closed."""
        while not self._closed.is_set():
            for made in wait(self.sockets, 0.1):
                assert isinstance(made, socket.socket)
                self.reached.append(made.recv(9) if made.type == socket.SOCK_DGRAM else made.accept())

    def seen(self):
        """Return everything that an attack could have changed."""
        status = self.target.stat()
        return (
            self.target.read_text(),
            (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns),
            os.listxattr(self.target), os.listdir(self.outside), os.path.exists(f"/dev/shm/{SECRET}"),
            self.victim.poll(), os.getpriority(os.PRIO_PROCESS, self.victim.pid),
            os.sched_getaffinity(self.victim.pid), os.sched_getscheduler(self.victim.pid),
            Path(f"/proc/{self.victim.pid}/limits").read_text(), len(self.reached),
        )  # fmt: skip

    def close(self):
        self.victim.kill()
        self.victim.wait()
        self._closed.set()
        self._ears.join()
        for made in self.sockets:
            made.close()


@pytest.fixture(scope="module")
def field(helper):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="field-") as folder:
        made = Field(Path(folder), helper.user)
        yield made
        made.close()


def sandboxed(helper):
    """Return the live processes with a sandbox's folder in their command line, but the helper's own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent, *_ = (entry / "stat").read_text().rsplit(")")[-1].split()
            started = state == "Z" or int(parent) == helper.process.pid
            if not started and str(helper.scratch).encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
    return found


@contextmanager
def nothing_left(helper, field):
    """Fail if a target has changed, or if a process or a folder of the sandbox is left."""
    yield
    until = time.monotonic() + 2
    while sandboxed(helper) and time.monotonic() < until:
        time.sleep(0.02)
    assert sandboxed(helper) == []
    assert field.seen() == field.before
    assert [path for path in helper.scratch.glob("*/*") if path.is_dir()] == []
    assert helper.process.poll() is None


@by_helper(REFUSED)
def test_an_attack_comes_to_nothing(name, helper, field):
    with nothing_left(helper, field):
        ran = helper.run(REFUSED[name].format(**field.names), seconds=20)
        assert "ESCAPED" not in ran.stdout and ran.status in ("finished", "error")
        # A programming error in the attack would mean that it attacked nothing.
        assert not re.search("SyntaxError|NameError|TypeError|IndexError", ran.stderr)


@by_helper(LEFT_BEHIND)
def test_nothing_outlives_a_program(name, helper, field):
    with nothing_left(helper, field):
        ran = helper.run(LEFT_BEHIND[name], seconds=20)
        # The status is "disk" if the program made an unreadable folder.
        assert ran.status in ("finished", "error", "disk") and ran.seconds < 15


@pytest.mark.slow
@by_helper(LIMITED)
def test_a_limit_ends_a_program(name, helper, field):
    program, limit = LIMITED[name]
    seconds = SECONDS if limit == "timeout" else 20
    with nothing_left(helper, field):
        ran = helper.run(program, seconds)
        assert ran.status == limit and ran.seconds < seconds + 5


@by_helper(HONEST)
def test_an_honest_program_works(name, helper, field):
    program, wanted = HONEST[name]
    with nothing_left(helper, field):
        ran = helper.run(program, seconds=20)
        assert (ran.status, ran.stdout) == ("finished", wanted), ran.stderr


@by_helper(["dumps"])
def test_a_crash_is_handed_to_nobody(name, helper):
    found = set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(helper.run, "import time; time.sleep(1)", 20)
        while not running.done():
            for process in sandboxed(helper):
                with suppress(OSError):
                    limits = Path("/proc", process, "limits").read_text()
                    found |= set(re.findall(r"Max core file size +(\S+ +\S+)", limits))
            time.sleep(0.02)
    assert {tuple(each.split()) for each in found} >= {("1", "1")}


@by_helper(["marks"])
def test_a_run_finds_nothing_of_another(name, helper, field):
    before = helper.run(LOOKING).stdout.splitlines()
    assert before[0] == f"[] None {int(before[0].split()[2])} 2 a"
    assert before[1].startswith("False ") and before[1].endswith(" ['program.py'] box")
    assert helper.run(MARKING).status == "finished"
    after = helper.run(LOOKING).stdout.splitlines()
    assert after[:2] == before[:2] and after[2] != before[2]


def test_a_waiting_process_that_was_killed_is_replaced():
    if protections.Sandlock.version() is None:
        pytest.skip("sandlock is not installed")

    def parent():
        return local.run("import os; print(os.getppid())", "", protections.Limits(), protections.Sandlock)

    first = parent()
    assert first == parent()  # both were forked from the same process
    os.kill(int(first.stdout), 9)
    os.waitid(os.P_PID, int(first.stdout), os.WEXITED | os.WNOWAIT)
    after = parent()
    assert after.status == "finished" and after != first


def test_the_page_says_how_much_is_let_through_and_tried():
    page = (Path(__file__).parents[2] / "docs/sandbox.md").read_text(encoding="utf-8")
    assert f"{len(CALLS) // 3} system calls" in page
    tried = len(REFUSED) + len(LIMITED) + len(LEFT_BEHIND)
    assert f"tries {tried} such programs" in page and f"{len(HONEST)} honest ones" in page
