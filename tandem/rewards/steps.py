"""Split a response into steps at separators, and find the token at the end of each step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from transformers import PreTrainedTokenizerBase


def step_ends(text: str, separator: str) -> list[int]:
    """Return the end of each step of a text, in characters from the beginning.

    Each step ends after its separator. The last step ends at the end of the text. Blank steps are ignored.
    """
    ends, at = [], 0
    for step in text.split(separator):
        at += len(step) + len(separator)
        if step.strip():
            ends.append(min(at, len(text)))
    return ends


def ending_tokens(text_ends: Sequence[int], token_ends: Sequence[int]) -> list[int]:
    """Return the index of the last token of each step.

    Args:
        text_ends: The number of characters up to the end of each step.
        token_ends: The number of characters up to the end of each token, ascending.
    """
    return [bisect_left(token_ends, end) for end in text_ends]


def steps_of_ids(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], separator: str) -> list[int]:
    """Return the index of the last token of each step of a response.

    Each token is decoded separately, so that its position in the text is known.
    """
    pieces = [str(tokenizer.decode([token], skip_special_tokens=True)) for token in ids]
    return ending_tokens(step_ends("".join(pieces), separator), list(accumulate(map(len, pieces))))
