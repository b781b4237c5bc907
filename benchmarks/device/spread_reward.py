"""A reward of random text: different for each response, so that an update has something to do."""

from __future__ import annotations

import zlib
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """The text's checksum, between 0 and 1."""
    return zlib.crc32(solution_str.encode()) / 2**32
