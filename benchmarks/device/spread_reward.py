"""A reward for random text that differs between responses, so that an update is not empty."""

from __future__ import annotations

import zlib
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return the checksum of the text, scaled to 0..1."""
    return zlib.crc32(solution_str.encode()) / 2**32
