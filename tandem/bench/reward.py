"""The reward of a benchmark, in a module that loads quickly."""

from __future__ import annotations

import zlib


def drawn(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Return a reward of 0 or 1 that depends only on the text of the response."""
    return float(zlib.crc32(solution_str.encode()) & 1)
