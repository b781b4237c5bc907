"""The file on a shared file system through which the nodes of a cluster find its head, and the token
beside it that lets them in."""

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
    """The head of a cluster, as its file names it.

    Attributes:
        address: of the machine.
        port: of the cluster's head there.
        job: the scheduler's job, where one is known.
        start: a random name of this start of the head: the next one differs.
    """

    address: str
    port: int
    job: str | None
    start: str

    def __str__(self) -> str:
        job = "" if self.job is None else f" of job {self.job}"
        return f"the head {self.address}:{self.port}{job}"

    def answers(self) -> bool:
        """Whether something accepts connections there."""
        try:
            with socket.create_connection((self.address, self.port), timeout=ANSWER_S):
                return True
        except OSError:
            return False


class HeadFile:
    """The file.

    Args:
        path: on a file system that all nodes share.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.token_path = self.path.with_name(f"{self.path.name}.token")

    def read(self) -> Head | None:
        """Reads the head from the file; None where there is no file.

        Raises:
            TandemError: it is no head file.
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
            raise TandemError(f"{self.path} holds {text[:80]!r}, which is no head's address") from error

    def living(self, job: str | None) -> tuple[Head | None, str]:
        """The head to join, or None and why there is none yet."""
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
        """Tells whether the head ended in order: its file names it no longer, and nothing answers."""
        try:
            named = self.read()
        except TandemError:
            named = None
        return named != head and not head.answers()

    def claim(self) -> None:
        """Removes what an earlier head left.

        Raises:
            TandemError: the file belongs to a head that lives, or is something else.
        """
        earlier = self.read()
        if earlier is not None and earlier.answers():
            raise TandemError(
                f"{self.path} names {earlier}, which answers; choose another --head-file, or remove this one "
                "if that is not a cluster of yours"
            )
        self.remove()

    def write(self, head: Head) -> None:
        """Appears whole, or not at all."""
        _write(self.path, json.dumps(asdict(head), indent=2) + "\n")

    def write_token(self, token: str) -> None:
        _write(self.token_path, token)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.token_path.unlink(missing_ok=True)


def known_token(environment: Mapping[str, str]) -> str:
    """The user's own token, from where Ray looks for it; a new one where there is none."""
    if environment.get("RAY_AUTH_TOKEN"):
        return environment["RAY_AUTH_TOKEN"]
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text(encoding="utf-8").strip() or secrets.token_hex(32)
    except OSError:
        return secrets.token_hex(32)


def _write(path: Path, text: str) -> None:
    """By a rename, so that nobody reads a part; for this user's eyes only."""
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
