"""A check whether a response's last token completes a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]

_MARGIN = 8  # more tokens before the window, because some decode to nothing or to part of a character


def ends_with_stop(tokens: np.ndarray, stop: Sequence[str], decode: Decode, min_tokens: int = 0) -> bool:
    """Return whether the last token completes one of `stop` in the decoded text.

    Only as many tokens are decoded as the longest string can span at one byte per token. So the check costs
    the same at every position.

    Args:
        tokens: (R) int64, the response so far. Call this at each token after the first `min_tokens`.
        stop: The stop strings.
        decode: Decodes token ids to text.
        min_tokens: A string that ends among the first `min_tokens` tokens does not count. The tokens after
            them must contain no stop string before the last token.
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
