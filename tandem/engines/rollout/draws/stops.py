"""A function that checks whether the last token of a response completes a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]

_MARGIN = 8  # more tokens before the window, because some decode to nothing or to part of a character


def ends_with_stop(tokens: np.ndarray, stop: Sequence[str], decode: Decode, min_tokens: int = 0) -> bool:
    """Return whether the decoded text of the last token completes one of the stop strings.

    Only the last tokens are decoded: as many as the longest stop string has bytes, plus a margin. So the cost
    does not grow with the response.

    Args:
        tokens: (R) int64, the response so far. Call this function after each new token, from token
            `min_tokens` + 1 on.
        stop: The stop strings.
        decode: A function that decodes token ids to text.
        min_tokens: A stop string that ends within the first `min_tokens` tokens does not count. Between these
            tokens and the last token, the response must contain no stop string.
    """
    window = max(len(text.encode()) for text in stop) + _MARGIN
    recent = tokens[-window:].tolist()
    text = decode(recent)
    found = [candidate for candidate in stop if candidate in text]
    if not found or len(tokens) - len(recent) >= min_tokens:
        return bool(found)
    # A string that ends before the first character that the last token changed was complete before.
    before = decode(recent[:-1])
    shorter = min(len(text), len(before))
    old = next((i for i in range(shorter) if text[i] != before[i]), shorter)
    return any(text.find(candidate, max(0, old - len(candidate) + 1)) >= 0 for candidate in found)
