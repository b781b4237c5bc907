"""Finished pieces of work in a file, from which the same command goes on after it was killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError, DataError
from tandem.hidden import masked
from tandem.observability.files import append_line, whole_lines
from tandem.texts import parse_json

SYNC_S = 1.0
"""How much work a machine that loses power may lose. A process that is killed loses none of what it
appended."""


class Journal:
    """A file of JSON lines: first the settings that the work depends on, then each finished piece.

    Args:
        path: the file; made by the first append, in a folder that exists.
        settings: name to plain value. Work done under other ones is not gone on with.
        overwrite: drop what is there.

    Attributes:
        entries: what was there, in the order it was appended.

    Raises:
        ConfigError: the file was made with other settings; says which.
        DataError: the file is no journal.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.path = path
        self._header = masked(json.dumps({"settings": settings}))
        self._synced = time.monotonic()
        self.entries: list[dict[str, Any]] = []
        if overwrite:
            self.remove()
        lines = whole_lines(path) if path.exists() else []
        if not lines:
            return
        try:
            then = parse_json(lines[0])["settings"]
            self.entries = [parse_json(line) for line in lines[1:]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                "not a file of finished work",
                field=str(path),
                got=str(error),
                remedy="move it away, or start anew with --overwrite",
            ) from error
        now = parse_json(self._header)["settings"]
        if names := [name for name in {**then, **now} if then.get(name) != now.get(name)]:
            raise ConfigError(
                f"unfinished work of other settings is there: {len(self.entries)} finished pieces",
                field=str(self.path),
                got="; ".join(f"{name}={now.get(name)}" for name in names),
                expected="; ".join(f"{name}={then.get(name)}" for name in names),
                remedy="go on with those settings, choose another data.output_path, or drop that work with "
                "--overwrite",
            )

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Adds pieces of work; once this returns, killing the process does not lose them."""
        lines = [json.dumps(entry) for entry in entries]
        if not lines:
            return
        now = time.monotonic()
        durable = now - self._synced > SYNC_S
        append_line(self.path, "\n".join(lines), header=self._header, durable=durable)
        if durable:
            self._synced = now

    def remove(self) -> None:
        """Deletes the file, if it is there."""
        self.path.unlink(missing_ok=True)
