"""The server of `warm` and its client. Both use only the standard library, so the client starts fast.

As a program, `warm_server.py SOCKET` serves until its standard input ends. Under the name `python` beside the
socket, it replaces the interpreter: the server forks Ray's workers, and anything else is executed.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

LENGTH = 8
IMPORTED = (  # not Ray, because its import reads settings from the environment
    "tandem.trainer.assembly",
    "tandem.trainer.supervised",
    "tandem.workers.actor",
    "tandem.workers.critic",
    "transformers.models.qwen2.modeling_qwen2",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.testing",
)


def ask(path: object, request: dict[str, object], streams: list[int]) -> socket.socket:
    """Request a process; the answer is its id and later its status; if the connection ends, it is killed."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(path))
    text = json.dumps(request).encode()
    line.sendmsg(
        [len(text).to_bytes(LENGTH, "big")],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))],
    )
    line.sendall(text)
    return line


def stand_in() -> None:
    words = sys.argv[1:]
    if not any(word.endswith("default_worker.py") for word in words):
        os.execv(sys.executable, [sys.executable, *words])
    place = os.path.join(os.path.dirname(os.path.abspath(__file__)), "socket")
    request = {"words": words, "cwd": os.getcwd(), "env": dict(os.environ), "session": False}
    with ask(place, request, [0, 1, 2]) as line, line.makefile("r") as answers:
        pid = int(answers.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda sent, _: os.kill(pid, sent))
        status = os.waitstatus_to_exitcode(int(answers.readline() or "9"))
    os._exit(status if status >= 0 else 128 - status)


class Server:
    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{path}.new")
        self.listener.listen(64)
        self.awake, wakes = socket.socketpair()
        for end in (self.awake, wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self.wakes = wakes
        self.running: dict[int, socket.socket] = {}  # the connection of each process id
        os.rename(f"{path}.new", path)  # a client that sees the name can connect

    def serve(self) -> list[str] | None:
        """Serve until standard input ends, and return None; in a child, return the words of its program."""
        with selectors.DefaultSelector() as ready:
            for source in (sys.stdin.fileno(), self.listener, self.awake):
                ready.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self.listener:
                        words = self._fork(ready)
                        if words is not None:
                            return words
                    elif key.fileobj is self.awake:
                        self._reap(ready)
                    elif key.data is not None:  # a client that has closed its side
                        self._kill(key.data)
                        ready.unregister(key.fileobj)
                    else:
                        self._end()
                        return None

    def _fork(self, ready: selectors.BaseSelector) -> list[str] | None:
        line, _ = self.listener.accept()
        request, streams = _receive(line)
        pid = fork_alone()
        if pid == 0:
            ready.close()
            signal.set_wakeup_fd(-1)
            for other in (line, self.listener, self.awake, self.wakes, *self.running.values()):
                other.close()
            return _become(request, streams)
        for stream in streams:
            os.close(stream)
        self.running[pid] = line
        ready.register(line, selectors.EVENT_READ, pid)
        with suppress(OSError):
            line.sendall(b"%d\n" % pid)
        return None

    def _reap(self, ready: selectors.BaseSelector) -> None:
        self.awake.recv(4096)
        while self.running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            line = self.running.pop(pid)
            with suppress(KeyError):
                ready.unregister(line)
            with suppress(OSError):
                line.sendall(b"%d\n" % status)
            line.close()

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        for pid in self.running:
            self._kill(pid)


def _receive(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, streams, _, _ = socket.recv_fds(line, LENGTH, 3)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += line.recv(1 << 16)
    return json.loads(text), list(streams)


def _become(request: dict[str, Any], streams: list[int]) -> list[str]:
    """Turn the forked process into one that was started with this request."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - those of the process
    for name, own in (("stdout", 1), ("stderr", 2)):
        lines = own == 2 or os.isatty(own)
        stream = open(own, "w", closefd=False, buffering=1 if lines else -1)  # noqa: SIM115
        stream.reconfigure(write_through=unbuffered)
        setattr(sys, name, stream)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, given), *(path for path in sys.path if path not in given)]
    np.random.seed()
    return list(request["words"])


def program(words: list[str]) -> None:
    if words[0].endswith("setup_worker.py"):  # Ray's worker; do the setup that this file would do
        parser = argparse.ArgumentParser()
        parser.add_argument("--serialized-runtime-env-context", default="{}")
        parser.add_argument("--language")
        options, words = parser.parse_known_args(words[1:])
        os.environ.update(json.loads(options.serialized_runtime_env_context).get("env_vars") or {})
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if os.path.basename(__file__) == "python":
        stand_in()
    import argparse
    import gc
    import importlib
    import runpy
    import selectors

    import numpy as np

    from tandem.lifetime import fork_alone

    sys.path.pop(0)  # this folder
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    asked = Server(sys.argv[1]).serve()
    if asked is not None:
        program(asked)
