"""How deep the JSON of a data file is nested. Arrow's reader goes one call deeper for each level, and the
process dies where there is no more stack; here such a file is refused before Arrow sees it."""

from __future__ import annotations

from typing import IO

import numpy as np

DEEPEST = 100
_PIECE = 1 << 18  # looked at together
_MARKS = b'[]{}"\n'
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_PAIRS = (b'""', b"{}", b"[]", b"{}", b"[]")
"""What most rows come down to once all else is left out. A level is lost with each pair of brackets, two at
most of each kind, so that `DEEPEST` is exact but for four."""


class Shallow:
    """A file of JSON, whose bytes are looked at as they are read. Brackets within strings do not count.

    Args:
        file: open for reading, at its beginning.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._depth, self._inside, self._escape = 0, False, b""

    def read(self, size: int = -1) -> bytes:
        """
        Raises:
            ValueError: it is nested deeper than `DEEPEST`.
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
            self._escape = piece[-1:] if piece.endswith(b"\\") else b""  # of what begins the next piece
        piece = piece.translate(None, _OTHERS)
        for pair in _PAIRS:
            piece = piece.replace(pair, b"")
        if not piece:
            return
        marks = np.frombuffer(piece, np.uint8)
        quotes = (marks == ord('"')).cumsum() + self._inside
        lines = np.where(marks == ord("\n"), quotes, 0)  # a string ends with its line at the latest
        inside = (quotes - np.maximum.accumulate(lines)) % 2 == 1
        opens, closes = (np.isin(marks, list(brackets)) & ~inside for brackets in (b"[{", b"]}"))
        depths = self._depth + (opens.astype(np.int64) - closes).cumsum()
        self._depth, self._inside = int(depths[-1]), bool(inside[-1])
        if depths.max() > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST}")
