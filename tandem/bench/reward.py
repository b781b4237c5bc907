"""A benchmark's reward, in a module that loads at once."""

from __future__ import annotations

import zlib


def drawn(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """A reward of 0 or 1 that depends on nothing but the response's text."""
    return float(zlib.crc32(solution_str.encode()) & 1)
