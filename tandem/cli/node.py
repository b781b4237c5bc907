"""The command `tandem node`."""

from __future__ import annotations

import math
import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.node_address import is_free, own_address
from tandem.cli.node_file import Head, HeadFile, known_token
from tandem.cli.node_processes import Processes
from tandem.cli.node_ray import RayNode, environment
from tandem.cli.typed import run_typed
from tandem.errors import ConfigError, TandemError

JOIN_S = 60.0  # minimum time for Ray to join a head that is up
RETRY_S = 5.0  # pause between two attempts to join
LOOK_S = 1.0  # pause between two reads of the head's file
PROBE_S = 3.0  # pause between two connections to the head's port
SILENT_PROBES = 5  # the head is gone after so many unanswered connections in a row


@dataclass(frozen=True)
class Settings:
    """The settings of a cluster node, from the command line and the environment.

    Attributes:
        rank: rank of this machine; 0 is the head.
        port: port of the head.
        job: the scheduler's job id, or None if unknown; head files of other jobs are ignored.
        file: the shared file with the head's address.
        timeout_s: seconds within which the head must be running.
        grace_s: seconds that a follower continues after a first signal, so that the head can end first.
        address: address of this machine; None: determine the address.
        interface: network interface whose address to use; None: the interface with the default route.
        words: additional words for `ray start`.
        command: the command that rank 0 runs.
    """

    rank: int
    port: int
    job: str | None
    file: HeadFile
    timeout_s: float
    grace_s: float
    address: str | None
    interface: str | None
    words: list[str]
    command: list[str]

    def say(self, sentence: str) -> None:
        print(f"node {self.rank}: {sentence}", flush=True)


def node(arguments: list[str]) -> int:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given: list[Settings] = []

    def options(
        head_file: Path | None = None,
        timeout: float = 360.0,
        grace: float = 120.0,
        address: str | None = None,
        interface: str | None = None,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        temp_dir: Path | None = None,
        ray: Annotated[list[str] | None, typer.Option(metavar="WORD")] = None,
    ) -> None:
        """Join this machine to a Ray cluster.

        Run the command on every machine, with the same arguments. The
        environment variables RANK (0: the head) and MASTER_PORT (the head's
        port) must be set. The machines find the head's address in a shared
        file. Rank 0 runs COMMAND with RAY_ADDRESS set and exits with its
        status; without COMMAND it waits for a signal. The other ranks stay
        until the head is gone.

        Signals go to COMMAND. The other ranks then stay for --grace seconds,
        because the head may still have to save. All processes end with this
        command.

        Args:
            head_file: the shared file; default: TANDEM_HEAD_FILE, or ./ray_head.json
            timeout: seconds within which the head must be up
            grace: how many seconds the other ranks stay after a first signal
            address: address of this machine; default: the address that it uses to reach
                other machines
            interface: network interface whose address to use
            num_cpus: CPUs to offer; default: all
            num_gpus: GPUs to offer; default: all
            temp_dir: folder for Ray's session files; default: Ray's own
            ray: an additional argument for `ray start`; may be given several times
        """
        offered = {"num-cpus": num_cpus, "num-gpus": num_gpus, "temp-dir": temp_dir}
        words = [f"--{name}={amount}" for name, amount in offered.items() if amount is not None]
        given.append(
            Settings(
                rank=_whole("RANK", 0, 1_000_000),
                port=_whole("MASTER_PORT", 1, 65_535),
                job=os.environ.get("TANDEM_JOB_ID") or os.environ.get("SLURM_JOB_ID") or None,
                file=HeadFile(head_file or Path(os.environ.get("TANDEM_HEAD_FILE") or "ray_head.json")),
                timeout_s=timeout,
                grace_s=grace,
                address=address,
                interface=interface,
                words=[*words, *(ray or ())],
                command=arguments[cut + 1 :],
            )
        )

    run_typed("node", options, arguments[:cut], example="tandem node OPTIONS -- COMMAND …")
    return _run(given[0]) if given else 0  # without settings: the command line asked for help


def _run(settings: Settings) -> int:
    with tempfile.TemporaryFile() as log, Processes() as processes:
        ray = RayNode(processes, log, settings.words)
        return (_lead if settings.rank == 0 else _follow)(settings, processes, ray)


def _whole(name: str, least: int, most: int) -> int:
    text = os.environ.get(name)
    if text is None:
        raise ConfigError(f"the environment variable {name} is not set; it must be a whole number")
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise ConfigError(
            f"the environment variable {name} is {text!r}; it must be a whole number from {least} to {most}"
        )
    return int(text)


def _lead(settings: Settings, processes: Processes, ray: RayNode) -> int:
    """Run the head of the cluster (rank 0) and return the exit status."""
    file = settings.file
    file.claim()
    address = settings.address or own_address(settings.interface)
    if not is_free(settings.port):
        raise TandemError(f"MASTER_PORT {settings.port} is in use on this machine; choose another")
    locked = os.environ.get("RAY_AUTH_MODE", "token") == "token"
    try:
        if locked:
            file.write_token(known_token(os.environ))
        variables = environment(file, locked=locked)
        variables["RAY_ADDRESS"] = f"{address}:{settings.port}"
        head_words = ["--head", f"--port={settings.port}", f"--node-ip-address={address}"]
        ray.start(head_words, {name: value for name, value in variables.items() if name != "RAY_ADDRESS"})
        if not ray.is_up(time.monotonic() + settings.timeout_s):
            if processes.stop_asked:
                return _stopped(settings, processes)
            raise TandemError(
                f"Ray's head did not start on {address}; its last lines of output:\n{ray.last_lines()}"
            )
        file.write(Head(address, settings.port, settings.job, secrets.token_hex(8)))
        settings.say(f"the head is up at {address}:{settings.port}; its address is in {file.path}")
        return _serve(settings, processes, ray, variables)
    finally:
        file.remove()  # before Ray ends, so that the other nodes see that the head ended normally


def _serve(settings: Settings, processes: Processes, ray: RayNode, variables: Mapping[str, str]) -> int:
    """Run the user's command, or wait for a signal, and return the exit status."""
    if not settings.command:
        names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
        exports = " ".join(f"{name}={variables[name]}" for name in names if name in variables)
        settings.say(f"to use the cluster in other programs, run: export {exports}")
        while not processes.stop_asked:
            ray.require()
            processes.pause(LOOK_S)
        return _stopped(settings, processes)
    command = processes.start(settings.command, variables)
    while command.poll() is None:
        ray.require()
        processes.pause(LOOK_S)
        processes.pass_on(command)
    status = command.returncode
    settings.say(f"{settings.command[0]} exited with status {status}")
    return status if status >= 0 else 128 - status


def _stopped(settings: Settings, processes: Processes) -> int:
    """Return the exit status after a signal.

    The status is 128 + the number of the signal if there was a command to run, else 0.
    """
    return 128 + processes.received[0] if settings.command else 0


def _follow(settings: Settings, processes: Processes, ray: RayNode) -> int:
    """Join the head's cluster (ranks above 0) and return the exit status."""
    deadline = time.monotonic() + settings.timeout_s
    while True:
        head = _await_head(settings, processes, deadline)
        if head is None:
            return 0
        address = settings.address or own_address(settings.interface, towards=head.address)
        words = [f"--address={head.address}:{head.port}", f"--node-ip-address={address}"]
        ray.start(words, environment(settings.file, locked=settings.file.token_path.exists()))
        if ray.is_up(max(deadline, time.monotonic() + JOIN_S), partial(settings.file.has_ended, head)):
            settings.say(f"{address} has joined {head}")
            return _stay(settings, processes, ray, head)
        if processes.stop_asked or settings.file.has_ended(head):
            return 0
        settings.say(f"Ray could not join {head}; its last lines of output:\n{ray.last_lines()}")
        if time.monotonic() > deadline:
            raise TandemError(f"no head within {settings.timeout_s:g} s: this machine could not join {head}")
        processes.end()
        retry_at = time.monotonic() + RETRY_S
        while time.monotonic() < retry_at and not processes.stop_asked:
            processes.pause(LOOK_S)


def _await_head(settings: Settings, processes: Processes, deadline: float) -> Head | None:
    """Wait until the head is running and return the head; None if a signal arrives first.

    Raises:
        TandemError: the head is not running at the deadline.
    """
    while not processes.stop_asked:
        head, reason = settings.file.living(settings.job)
        if head is not None:
            return head
        if time.monotonic() > deadline:
            raise TandemError(f"no head within {settings.timeout_s:g} s: {reason}")
        processes.pause(LOOK_S)
    return None


def _stay(settings: Settings, processes: Processes, ray: RayNode, head: Head) -> int:
    """Wait until the head has ended. Return 0 if it ended normally, or if signals stopped this node.

    Raises:
        TandemError: the head, or Ray on this machine, ended unexpectedly.
    """
    silent, probe_at, leave_at = 0, time.monotonic() + PROBE_S, math.inf
    while time.monotonic() < leave_at:
        if settings.file.has_ended(head):
            settings.say(f"{head} has ended")
            return 0
        ray.require()
        if time.monotonic() > probe_at:
            silent = 0 if head.answers() else silent + 1
            probe_at = time.monotonic() + PROBE_S
        if silent == SILENT_PROBES:
            raise TandemError(f"{head} stopped answering and did not end normally; this node stops")
        processes.pause(LOOK_S)
        if processes.stop_asked:
            again = leave_at < math.inf
            leave_at = time.monotonic() + (0 if again else settings.grace_s)
            settings.say(
                f"leaving {head} " + ("now" if again else f"when it ends, or after {settings.grace_s:g} s")
            )
        processes.received.clear()
    return 0
