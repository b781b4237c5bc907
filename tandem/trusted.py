"""Decide which files with code may run when a run folder is read.

Two types of files may run: files that this user's runs wrote, which have a signature; and files below the
folders in the environment variable TANDEM_TRUST.

The key of the signatures is in the user's state folder, outside all run folders. A file from another user
cannot have a signature with this key, even if the file is copied.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from tandem.errors import ConfigError, file_errors

TRUST = "TANDEM_TRUST"
_KEY_BYTES = 32


def sign(path: Path) -> None:
    """Write the signature of a file next to it.

    If the user's key cannot be stored, no signature is written.

    Raises:
        FileError: the signature cannot be written.
    """
    try:
        key = _key(make=True)
    except (OSError, RuntimeError):
        return
    with file_errors(_beside(path)):
        _beside(path).write_text(_signature(key, path.read_bytes()), encoding="ascii")


def is_own(path: Path, content: bytes) -> bool:
    """Return whether this user's run wrote a file with this content, or TANDEM_TRUST names the file."""
    whole = path.resolve()
    named = [Path(each).expanduser().resolve() for each in _named()]
    if any(whole == each or each in whole.parents for each in named):
        return True
    try:
        signature = _beside(path).read_bytes()
        return hmac.compare_digest(signature, _signature(_key(make=False), content).encode())
    except (OSError, RuntimeError):
        return False


def read_own(path: Path) -> bytes:
    """Return the content of a file with a pickled function.

    Raises:
        ConfigError: no run of this user wrote the file.
    """
    content = path.read_bytes()
    if not is_own(path, content):
        raise ConfigError(
            "reading a pickled function runs code, and no run of yours wrote this file",
            field=str(path),
            expected="a file that a run of this user wrote on a machine with this home folder",
            remedy="give the function's source instead, file.py:function; or, if you know who wrote the "
            f"file, allow it: {TRUST}={path.parent}",
        )
    trust(path)
    return content


def trust(path: Path) -> None:
    """Trust a file in this process and in the processes that it starts.

    Such processes may have another home folder, and therefore another key.
    """
    whole = str(path.resolve())
    if whole not in _named():
        os.environ[TRUST] = os.pathsep.join([*_named(), whole])


def _named() -> list[str]:
    return [each for each in os.environ.get(TRUST, "").split(os.pathsep) if each]


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".sig")


def _signature(key: bytes, content: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """Return the user's key; with `make`, create a missing key.

    Raises:
        OSError: the key does not exist or cannot be stored.
        RuntimeError: the home folder is unknown.
    """
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tandem"
    file = folder / "key"
    if make and not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as made:  # only its owner can read it
            made.write(secrets.token_bytes(_KEY_BYTES))
            made.flush()
            with suppress(FileExistsError):  # another process was first
                os.link(made.name, file)
    key = file.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{file} is not a key")
    return key
