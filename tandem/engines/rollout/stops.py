"""Stop strings: whether a response's last token has completed one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]

_MARGIN = 8  # tokens before the window, for those that decode to nothing or to part of a character


def ends_with_stop(tokens: np.ndarray, stop: Sequence[str], decode: Decode) -> bool:
    """Whether one of `stop` stands in the text of the last tokens.

    Only as many tokens are decoded as the longest string can span, at one byte a token, so that the
    check costs the same at every position.

    Args:
        tokens: (R) int64, the response so far; called at each token, so earlier ones hold no stop string.
    """
    window = max(len(text.encode()) for text in stop) + _MARGIN
    text = decode(tokens[-window:].tolist())
    return any(candidate in text for candidate in stop)
