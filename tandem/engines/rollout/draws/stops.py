"""Stop strings: whether a response's last token has completed one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]

_MARGIN = 8  # tokens before the window, for those that decode to nothing or to part of a character


def ends_with_stop(tokens: np.ndarray, stop: Sequence[str], decode: Decode, min_tokens: int = 0) -> bool:
    """Whether the last token completes one of `stop` in the decoded text.

    Only as many tokens are decoded as the longest string can span, at one byte a token, so that the
    check costs the same at every position.

    Args:
        tokens: (R) int64, the response so far; called at each token after the first `min_tokens`.
        min_tokens: a string that ends among these does not count; later ones hold none before the last.
    """
    window = max(len(text.encode()) for text in stop) + _MARGIN
    recent = tokens[-window:].tolist()
    text = decode(recent)
    found = [candidate for candidate in stop if candidate in text]
    if not found or len(tokens) - len(recent) >= min_tokens:
        return bool(found)
    # A string that ends before the first character that the last token changed was there before.
    before = decode(recent[:-1])
    shorter = min(len(text), len(before))
    old = next((i for i in range(shorter) if text[i] != before[i]), shorter)
    return any(text.find(candidate, max(0, old - len(candidate) + 1)) >= 0 for candidate in found)
