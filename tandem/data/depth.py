"""A check of the nesting depth of JSON data files.

Arrow's JSON reader makes one recursive call per level, and the process crashes when its stack is full. The
check raises an error before Arrow sees such a file.
"""

from __future__ import annotations

from typing import IO

import numpy as np

DEEPEST = 100
_PIECE = 1 << 18  # bytes that are checked together
_MARKS = b'[]{}"\n'
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_PAIRS = (b'""', b"{}", b"[]", b"{}", b"[]")
"""The pairs of characters that are removed first. Most rows contain no other structure.

Removing a pair of brackets hides one level. At most two levels of each kind of bracket are hidden, so the
limit `DEEPEST` may be exceeded by up to four levels.
"""


class Shallow:
    """A JSON file that checks its nesting depth while it is read.

    Brackets inside strings do not count.

    Args:
        file: A file that is open for reading, at its beginning.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._depth, self._inside, self._escape = 0, False, b""

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes.

        Raises:
            ValueError: The JSON is nested deeper than `DEEPEST` levels.
        """
        found = self._file.read(size)
        for start in range(0, len(found), _PIECE):
            self._look(found[start : start + _PIECE])
        return found

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()

    def _look(self, piece: bytes) -> None:
        if self._escape or b"\\" in piece:
            piece = (self._escape + piece).replace(b"\\\\", b"").replace(b'\\"', b"")
            self._escape = piece[-1:] if piece.endswith(b"\\") else b""  # escapes the next piece
        piece = piece.translate(None, _OTHERS)
        for pair in _PAIRS:
            piece = piece.replace(pair, b"")
        if not piece:
            return
        marks = np.frombuffer(piece, np.uint8)
        quotes = (marks == ord('"')).cumsum() + self._inside
        lines = np.where(marks == ord("\n"), quotes, 0)  # no string continues on the next line
        inside = (quotes - np.maximum.accumulate(lines)) % 2 == 1
        opens, closes = (np.isin(marks, list(brackets)) & ~inside for brackets in (b"[{", b"]}"))
        depths = self._depth + (opens.astype(np.int64) - closes).cumsum()
        self._depth, self._inside = int(depths[-1]), bool(inside[-1])
        if depths.max() > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST} levels")
