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
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)}"
    name = _fresh_name()
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if tried.returncode != 0:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def cluster_network(nodes: int) -> Iterator[list[Node]]:
    """Create namespaces on one bridge, and at the end kill what is in them; or skip the test."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        switch = _namespace(stack)
        _inside(switch, "link", "add", "bridge", "type", "bridge")
        _inside(switch, "link", "set", "bridge", "up")
        yield [_node(stack, switch, number) for number in range(1, nodes + 1)]


def _node(stack: ExitStack, switch: str, number: int) -> Node:
    node = Node(_namespace(stack), f"{NETWORK}.{number}", "net0")
    port = f"port{number}"
    _inside(switch, "link", "add", port, "type", "veth", "peer", "name", "net0", "netns", node.name)
    _inside(switch, "link", "set", port, "master", "bridge", "up")
    _inside(node.name, "address", "add", f"{node.address}/24", "dev", "net0")
    _inside(node.name, "link", "set", "net0", "up")
    _inside(node.name, "link", "set", "lo", "up")
    return node


def _namespace(stack: ExitStack) -> str:
    name = _fresh_name()
    _ip("netns", "add", name)
    stack.callback(_remove, name)
    return name


def _fresh_name() -> str:
    return f"tandem-{uuid.uuid4().hex[:8]}"


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


def _inside(name: str, *words: str) -> None:
    _ip("-netns", name, *words)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
