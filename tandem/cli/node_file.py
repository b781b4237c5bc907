"""The file with the address of a cluster's head, for the other nodes, and the token next to the file.

File and token are on a shared file system. The token is the password of the cluster.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.errors import TandemError
from tandem.texts import parse_json

ANSWER_S = 2.0


@dataclass(frozen=True)
class Head:
    """The head of a cluster, as described in its file.

    Attributes:
        address: address of the machine.
        port: port of the head process.
        job: the scheduler's job id, if known.
        start: a random id, which is different for each start of a head.
    """

    address: str
    port: int
    job: str | None
    start: str

    def __str__(self) -> str:
        job = "" if self.job is None else f" of job {self.job}"
        return f"the head {self.address}:{self.port}{job}"

    def answers(self) -> bool:
        """Return whether a process accepts connections at the head's address and port."""
        try:
            with socket.create_connection((self.address, self.port), timeout=ANSWER_S):
                return True
        except OSError:
            return False


class HeadFile:
    """The file that describes the head of a cluster.

    Args:
        path: path of the file, on a file system that all nodes share.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.token_path = self.path.with_name(f"{self.path.name}.token")

    def read(self) -> Head | None:
        """Return the head that the file describes; None if the file does not exist.

        Raises:
            TandemError: the file cannot be read, or does not describe a head.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TandemError(f"{self.path} cannot be read ({error.strerror})") from error
        try:
            return Head(**parse_json(text))
        except (TypeError, ValueError) as error:
            raise TandemError(
                f"{self.path} holds {text[:80]!r}, which is not the address of a head"
            ) from error

    def living(self, job: str | None) -> tuple[Head | None, str]:
        """Return (head, "") if the head is running, or (None, the reason why not)."""
        try:
            head = self.read()
        except TandemError as error:
            return None, error.message
        if head is None:
            return None, f"{self.path} does not exist"
        if job is not None and head.job is not None and head.job != job:
            return None, f"{self.path} names {head}, but this is job {job}"
        if not head.answers():
            return None, f"{self.path} names {head}, but nothing answers there"
        return head, ""

    def has_ended(self, head: Head) -> bool:
        """Return whether the head ended normally: the file no longer describes it, and its port is closed."""
        try:
            named = self.read()
        except TandemError:
            named = None
        return named != head and not head.answers()

    def claim(self) -> None:
        """Remove the files of an earlier head.

        Raises:
            TandemError: the file belongs to a head that still answers, or is not a head file.
        """
        earlier = self.read()
        if earlier is not None and earlier.answers():
            raise TandemError(
                f"{self.path} names {earlier}, which answers; choose another --head-file, or remove this "
                "file if that is not your cluster"
            )
        self.remove()

    def write(self, head: Head) -> None:
        """Write the file atomically."""
        _write(self.path, json.dumps(asdict(head), indent=2) + "\n")

    def write_token(self, token: str) -> None:
        _write(self.token_path, token)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.token_path.unlink(missing_ok=True)


def known_token(environment: Mapping[str, str]) -> str:
    """Return the user's token, from the locations that Ray uses, or a new token if there is none."""
    if environment.get("RAY_AUTH_TOKEN"):
        return environment["RAY_AUTH_TOKEN"]
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text(encoding="utf-8").strip() or secrets.token_hex(32)
    except OSError:
        return secrets.token_hex(32)


def _write(path: Path, text: str) -> None:
    """Write a file atomically, such that only this user may read the file."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(
            os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise TandemError(f"{path} cannot be written ({error.strerror})") from error
