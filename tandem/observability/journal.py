"""A journal of finished work, so that a killed command can continue."""

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
"""Seconds of work that may be lost if the machine loses power.

If only the process is killed, no appended entry is lost.
"""


class Journal:
    """A file of JSON lines: first the settings that affect the work, then one entry per finished item.

    Args:
        path: the file. The first append creates it, in a folder that exists.
        settings: a dict from name to JSON value. A journal with other settings is an error.
        overwrite: delete an existing journal.

    Attributes:
        entries: the entries that exist at the start, in the order in which they were appended.

    Raises:
        ConfigError: If the file was made with other settings. The error names the settings.
        DataError: If the file is not a journal.
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
                "this is not a journal of finished work",
                field=str(path),
                got=str(error),
                remedy="move the file away, or start over with --overwrite",
            ) from error
        now = parse_json(self._header)["settings"]
        if names := [name for name in {**then, **now} if then.get(name) != now.get(name)]:
            raise ConfigError(
                f"there is unfinished work with other settings (finished parts: {len(self.entries)})",
                field=str(self.path),
                got="; ".join(f"{name}={now.get(name)}" for name in names),
                expected="; ".join(f"{name}={then.get(name)}" for name in names),
                remedy="continue with those settings, choose another data.output_path, or delete that work "
                "with --overwrite",
            )

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Append entries. When this returns, the entries survive a crash of the process."""
        lines = [json.dumps(entry) for entry in entries]
        if not lines:
            return
        now = time.monotonic()
        durable = now - self._synced > SYNC_S
        append_line(self.path, "\n".join(lines), header=self._header, durable=durable)
        if durable:
            self._synced = now

    def remove(self) -> None:
        """Delete the file if it exists."""
        self.path.unlink(missing_ok=True)
