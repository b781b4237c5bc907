"""Convert texts to token ids.

A response is tokenized as if the model generated it after its prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Piece = tuple[str | Sequence[int], bool]
"""A piece of a sequence: a text or token ids, and whether the model learns to generate it.

In a sequence, pieces of ids come before all texts.
"""
TOKENIZE_CHUNK = 4096
"""The number of texts per call of the tokenizer: large enough for speed, small enough for memory."""
_ANCHORS = ("\n", ":", "a", "0")
"""Texts to put before another text, so that the tokenizer treats the other text as a continuation."""


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the (T_i) int32 token ids of each text, without added special tokens."""
    chunks = (list(texts[start : start + TOKENIZE_CHUNK]) for start in range(0, len(texts), TOKENIZE_CHUNK))
    return [np.array(ids, dtype=np.int32) for chunk in chunks for ids in _token_ids(tokenizer, chunk)]


def encoded(
    tokenizer: PreTrainedTokenizerBase, sequences: Sequence[Sequence[Piece]]
) -> list[list[np.ndarray]]:
    """Return the int32 token ids of each piece of each sequence.

    If every piece ends between two tokens of the whole text, the concatenated ids of the pieces equal the ids
    of the whole text. If a token of the whole text crosses the end of a piece, the text up to this end is
    tokenized separately, in the same way as a prompt before the model's response. The following text is then
    tokenized as a continuation.
    """
    texts = [[text for text, _ in pieces if isinstance(text, str)] for pieces in sequences]
    found = _piece_ids(texts, lambda wanted: tokenize(tokenizer, wanted), tokenizer)
    given = [
        [np.array(ids, np.int32) for ids, _ in pieces if not isinstance(ids, str)] for pieces in sequences
    ]
    return [[*before, *after] for before, after in zip(given, found, strict=True)]


def begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer puts before a text: the id of its begin token, or []."""
    ids = list(tokenizer("")["input_ids"])
    after = {tokenizer.eos_token_id, getattr(tokenizer, "sep_token_id", None)} - {tokenizer.bos_token_id}
    while ids and ids[-1] in after:
        ids.pop()
    return ids


_Tokenize = Callable[[list[str]], list[np.ndarray]]


def _piece_ids(
    rows: Sequence[Sequence[str]], run: _Tokenize, tokenizer: PreTrainedTokenizerBase
) -> list[list[np.ndarray]]:
    """Return the ids of each text of each row; the texts of a row are consecutive parts of one sequence."""
    found = iter(run(["".join(texts[: end + 1]) for texts in rows for end in range(len(texts))]))
    return [_parts(texts, [next(found) for _ in texts], tokenizer) for texts in rows]


def _parts(
    texts: Sequence[str], up_to: Sequence[np.ndarray], tokenizer: PreTrainedTokenizerBase
) -> list[np.ndarray]:
    """Return the ids of each text of a row.

    `up_to` has, for each text, the ids of the row from its start to the end of the text.
    """
    parts: list[np.ndarray] = []
    start = 0
    for place, ids in enumerate(up_to):
        parts.append(ids[start:])
        if not _starts_with(up_to[-1], ids):
            rest = _piece_ids([texts[place + 1 :]], lambda wanted: _continued(tokenizer, wanted), tokenizer)
            return [*parts, *rest[0]]
        start = len(ids)
    return parts


def _starts_with(whole: np.ndarray, ids: np.ndarray) -> bool:
    return np.array_equal(whole[: len(ids)], ids)


def _continued(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """Return the ids of texts that follow another text.

    Some tokenizers put a space before a text. This space is left out here.
    """
    alone = tokenize(tokenizer, ["a"])[0].tolist()
    if tokenizer.decode(alone * 2, clean_up_tokenization_spaces=False) == "aa":
        return tokenize(tokenizer, texts)
    return [_after_anchor(tokenizer, text) for text in texts]


def _after_anchor(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    for anchor in _ANCHORS:
        before, whole = tokenize(tokenizer, [anchor, anchor + text])
        if len(before) and _starts_with(whole, before):
            return whole[len(before) :]
    return tokenize(tokenizer, [text])[0]


def _token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterable[Sequence[int]]:
    kind = type(tokenizer)
    fast = PreTrainedTokenizerFast
    if (
        kind.__call__ is not fast.__call__ or kind._encode_plus is not fast._encode_plus
    ):  # the tokenizer has its own code
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = tokenizer(texts, **options)["input_ids"]
        return ids
    # The same as calling the tokenizer, but without token offsets, which take a quarter of the time.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]
