"""Find rows with equal or similar prompts (`tandem data split` and `tandem data dedupe`)."""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from tandem.data.cache import number_of
from tandem.data.files import DataFiles
from tandem.errors import DataError

ROW_COLUMNS = ("prompt", "messages", "response", "chosen", "rejected")
SKETCH = 8
"""The number of a text's smallest n-gram hashes that are used to find similar texts.

Two texts that share 0.7 of their n-grams have no such hash in common in one of (1 - 0.7)^-8 = 15,000 cases.
"""
CROWD = 16
"""The largest number of texts with a common n-gram for which all pairs are compared, not only neighbours."""


def text_of(value: Any, *, prompt: bool) -> str:
    """Return a text, or the text of a conversation, in lower case and with single spaces.

    Args:
        value: a text or a conversation.
        prompt: use only the part of a conversation before the assistant's first turn.
    """
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        roles = [message["role"] for message in value]
        end = roles.index("assistant") if prompt and "assistant" in roles else len(value)
        value = "\n".join(f"{message['role']}: {message['content']}" for message in value[:end])
    return " ".join(str(value).split()).casefold()


class Texts:
    """The texts of rows, created on demand.

    Args:
        rows: the rows of one or several files.
        prompt: whether to use only the prompts; otherwise all texts of a row that a model learns from.
    """

    def __init__(self, rows: DataFiles, *, prompt: bool) -> None:
        there = [name for name in ROW_COLUMNS if name in rows.columns]
        if not there:
            got, expected = ", ".join(rows.columns), " or ".join(ROW_COLUMNS)
            raise DataError("a text column is missing", field=rows.names, got=got, expected=expected)
        self.rows, self._columns = rows, there[:1] if prompt else there
        self._prompt = prompt and there[0] != "prompt"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        return (self._text(record) for _, record in self.rows.records(self._columns))

    def __getitem__(self, row: int) -> str:
        return self._text(self.rows.take([row])[0])

    def _text(self, record: Mapping[str, Any]) -> str:
        return "\n".join(text_of(record[name], prompt=self._prompt) for name in self._columns)


def split(rows: DataFiles, share: float, seed: int) -> np.ndarray:
    """Choose a fraction of the rows of each data source. Rows with the same prompt stay together.

    Returns:
        (B) bool, whether each of the B rows is chosen.
    """
    hashes = np.fromiter(map(number_of, Texts(rows, prompt=True)), np.uint64, len(rows))
    _, first, group, sizes = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    named = "data_source" in rows.columns
    sources = np.array(rows.table["data_source"].to_pylist() if named else [""] * len(rows), dtype=object)
    of_group = np.array([str(source) for source in sources[first]])
    chosen = np.zeros(len(first), dtype=bool)
    generator = np.random.default_rng(seed)
    for source in np.unique(of_group):
        order = generator.permutation(np.flatnonzero(of_group == source))
        until = np.concatenate([[0], np.cumsum(sizes[order])])
        chosen[order[: np.abs(until - share * until[-1]).argmin()]] = True
    return np.asarray(chosen[group])


def alike(texts: Sequence[Texts], ngram: int, overlap: float) -> Iterator[tuple[int, int, float]]:
    """Yield pairs of equal or similar texts, with equal texts first.

    Similar texts share at least `overlap` of their word n-grams and have the same numbers in the same order.
    Candidates are found with the smallest hashes of their n-grams: Broder, "On the resemblance and
    containment of documents", 1997.

    Args:
        texts: the texts; rows are counted through all of them.
        ngram: words per n-gram; 0: yield only equal texts.
        overlap: the minimum fraction of common n-grams.

    Yields:
        (row, later row, fraction of common n-grams).
    """
    exact, hashes, rows = array("Q"), array("L"), array("q")
    for row, text in enumerate(text for each in texts for text in each):
        exact.append(number_of(text))
        least = sorted({zlib.crc32(gram.encode()) for gram in _ngrams(text, ngram)})[:SKETCH] if ngram else []
        hashes.extend(least)
        rows.extend([row] * len(least))
    same = np.array(exact)
    for group in _groups(same, np.arange(len(same))):
        yield from ((int(group[0]), int(row), 1.0) for row in group[1:])
    found: set[tuple[int, int]] = set()
    new = np.isin(rows, np.unique(same, return_index=True)[1])  # use each text once
    for group in _groups(np.array(hashes)[new], np.array(rows)[new]):
        found.update(combinations(group.tolist(), 2) if len(group) <= CROWD else pairwise(group.tolist()))
    for one, other in sorted(found, key=lambda pair: (pair[1], pair[0])):
        shared = _shared(_at(texts, one), _at(texts, other), ngram)
        if shared >= overlap:
            yield one, other, shared


def _groups(keys: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows with the same key, for each key that occurs more than once, in the order of the keys."""
    order = np.argsort(keys, kind="stable")
    for group in np.split(rows[order], np.flatnonzero(np.diff(keys[order])) + 1):
        if len(group) > 1:
            yield group


def _at(texts: Sequence[Texts], row: int) -> str:
    for each in texts:
        if row < len(each):
            return each[row]
        row -= len(each)
    raise IndexError(row)


def _shared(one: str, other: str, ngram: int) -> float:
    if re.findall(r"\d+", one) != re.findall(r"\d+", other):
        return 0.0
    first, second = _ngrams(one, ngram), _ngrams(other, ngram)
    return len(first & second) / len(first | second)


def _ngrams(text: str, size: int) -> set[str]:
    words = re.findall(r"\w+", text)
    return {" ".join(words[at : at + size]) for at in range(max(1, len(words) - size + 1))}
