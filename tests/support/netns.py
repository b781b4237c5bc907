"""Network namespaces with own addresses on one bridge, as machines of a cluster; needs root and iproute2."""

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

NETWORK = "10.213.0"  # the same in every network, because two networks are never connected
KILL_S = 5.0


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    interface: str

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in the namespace, whose process id is that of the command itself."""
        return subprocess.Popen(["nsenter", f"--net=/run/netns/{self.name}", *command], **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        return subprocess.run(["nsenter", f"--net=/run/netns/{self.name}", *command], check=False, **options)

    def processes(self) -> list[int]:
        return [int(word) for word in _ip("netns", "pids", self.name).split()]


def why_not() -> str | None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter"))):
        return "network namespaces need root, ip and nsenter"
    try:
        with ExitStack() as stack:
            _namespace(stack)
    except RuntimeError as error:
        return str(error)
    return None


@contextmanager
def cluster_network(nodes: int) -> Iterator[list[Node]]:
    """Create namespaces on one bridge, and at the end kill what is in them; or skip the test."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        switch = _namespace(stack)
        _ip("-netns", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-netns", switch, "link", "set", "bridge", "up")
        yield [_node(stack, switch, number) for number in range(1, nodes + 1)]


def _node(stack: ExitStack, switch: str, number: int) -> Node:
    node = Node(_namespace(stack), f"{NETWORK}.{number}", "net0")
    port = f"port{number}"
    _ip("-netns", switch, "link", "add", port, "type", "veth", "peer", "name", "net0", "netns", node.name)
    _ip("-netns", switch, "link", "set", port, "master", "bridge", "up")
    _ip("-netns", node.name, "address", "add", f"{node.address}/24", "dev", "net0")
    _ip("-netns", node.name, "link", "set", "net0", "up")
    _ip("-netns", node.name, "link", "set", "lo", "up")
    return node


def _namespace(stack: ExitStack) -> str:
    name = f"tandem-{uuid.uuid4().hex[:8]}"
    _ip("netns", "add", name)
    stack.callback(_remove, name)
    return name


def _remove(name: str) -> None:
    deadline = time.monotonic() + KILL_S
    while (pids := _ip("netns", "pids", name).split()) and time.monotonic() < deadline:
        for pid in map(int, pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    _ip("netns", "delete", name)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
