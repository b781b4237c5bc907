"""Texts to token ids, so that those of a response are what the model would write after its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Piece = tuple[str | Sequence[int], bool]
"""Text or token ids, and whether the model is to learn to write it. Ids stand before all texts."""
TOKENIZE_CHUNK = 4096
"""Texts per call of the tokenizer: enough to keep it busy, few enough to keep its results small."""
_ANCHORS = ("\n", ":", "a", "0")
"""Texts after one of which another is tokenised as one that goes on."""


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """(T_i) int32 token ids of each text as it stands: no special tokens are added."""
    chunks = (list(texts[start : start + TOKENIZE_CHUNK]) for start in range(0, len(texts), TOKENIZE_CHUNK))
    return [np.array(ids, dtype=np.int32) for chunk in chunks for ids in _token_ids(tokenizer, chunk)]


def encoded(
    tokenizer: PreTrainedTokenizerBase, sequences: Sequence[Sequence[Piece]]
) -> list[list[np.ndarray]]:
    """Return the int32 token ids of each piece of each sequence.

    Together they are those of the whole text, as far as each piece ends between two of its tokens. Where a
    token of the whole lies on both sides of such an end, the text up to there is tokenised as if it stood
    alone, as a prompt does when the model answers, and the rest as its continuation.
    """
    texts = [[text for text, _ in pieces if isinstance(text, str)] for pieces in sequences]
    found = _cut(texts, lambda wanted: tokenize(tokenizer, wanted), tokenizer)
    given = [
        [np.array(ids, np.int32) for ids, _ in pieces if not isinstance(ids, str)] for pieces in sequences
    ]
    return [[*before, *after] for before, after in zip(given, found, strict=True)]


def begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer puts before a text: those of its begin token, if it gives one."""
    ids = list(tokenizer("")["input_ids"])
    after = {tokenizer.eos_token_id, getattr(tokenizer, "sep_token_id", None)} - {tokenizer.bos_token_id}
    while ids and ids[-1] in after:
        ids.pop()
    return ids


_Tokenize = Callable[[list[str]], list[np.ndarray]]


def _cut(
    rows: Sequence[Sequence[str]], run: _Tokenize, tokenizer: PreTrainedTokenizerBase
) -> list[list[np.ndarray]]:
    """The ids of each text of each row; the texts of a row follow each other."""
    found = iter(run(["".join(texts[: end + 1]) for texts in rows for end in range(len(texts))]))
    return [_parts(texts, [next(found) for _ in texts], tokenizer) for texts in rows]


def _parts(
    texts: Sequence[str], up_to: Sequence[np.ndarray], tokenizer: PreTrainedTokenizerBase
) -> list[np.ndarray]:
    """The ids of each text, of those of the texts up to each."""
    parts: list[np.ndarray] = []
    start = 0
    for place, ids in enumerate(up_to):
        parts.append(ids[start:])
        if not _begins(up_to[-1], ids):
            rest = _cut([texts[place + 1 :]], lambda wanted: _continued(tokenizer, wanted), tokenizer)
            return [*parts, *rest[0]]
        start = len(ids)
    return parts


def _begins(whole: np.ndarray, ids: np.ndarray) -> bool:
    return np.array_equal(whole[: len(ids)], ids)


def _continued(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """The ids of texts that follow others: without the blank that some tokenizers put before a text."""
    alone = tokenize(tokenizer, ["a"])[0].tolist()
    if tokenizer.decode(alone * 2, clean_up_tokenization_spaces=False) == "aa":
        return tokenize(tokenizer, texts)
    return [_after_anchor(tokenizer, text) for text in texts]


def _after_anchor(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    for anchor in _ANCHORS:
        before, whole = tokenize(tokenizer, [anchor, anchor + text])
        if len(before) and _begins(whole, before):
            return whole[len(before) :]
    return tokenize(tokenizer, [text])[0]


def _token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterable[Sequence[int]]:
    kind = type(tokenizer)
    fast = PreTrainedTokenizerFast
    if kind.__call__ is not fast.__call__ or kind._encode_plus is not fast._encode_plus:  # code of its own
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = tokenizer(texts, **options)["input_ids"]
        return ids
    # What the call does, without the offsets of tokens in the text, which are a quarter of its time.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]
