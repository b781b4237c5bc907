"""Find the steps of a response between separators, and the tokens in which they end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from transformers import PreTrainedTokenizerBase


def step_ends(text: str, separator: str) -> list[int]:
    """Return where the steps of a text end, in characters from its beginning.

    Each step ends after its separator, the last one with the text. Blank steps are ignored.
    """
    ends, at = [], 0
    for step in text.split(separator):
        at += len(step) + len(separator)
        if step.strip():
            ends.append(min(at, len(text)))
    return ends


def ending_tokens(text_ends: Sequence[int], token_ends: Sequence[int]) -> list[int]:
    """Return the tokens in which steps end.

    Args:
        text_ends: The number of characters up to the end of each step.
        token_ends: The number of characters up to the end of each token, ascending.
    """
    return [bisect_left(token_ends, end) for end in text_ends]


def steps_of_ids(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], separator: str) -> list[int]:
    """Return the tokens in which the steps of a response end.

    Each token is decoded on its own, so that its place in the text is known.
    """
    pieces = [str(tokenizer.decode([token], skip_special_tokens=True)) for token in ids]
    return ending_tokens(step_ends("".join(pieces), separator), list(accumulate(map(len, pieces))))
