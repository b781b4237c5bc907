"""Show the contents of data files (`tandem data show`)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow.compute as pa_compute

from tandem.data.files import CHUNK_ROWS, DataFiles
from tandem.offline.parts import ROW_COLUMNS

PERCENTILES = (0, 5, 50, 95, 99, 100)
PIECES = 400
"""The maximum number of tokens that are shown individually."""


def summary(rows: DataFiles, source_key: str) -> Iterator[str]:
    """Yield lines with the number of rows, the columns with their types, and the data sources."""
    yield f"{rows.names}: {len(rows):,} rows"
    for name in rows.columns:
        column = rows.table[name]
        nulls = f", {column.null_count:,} null" if column.null_count else ""
        yield f"  {name}: {column.type}{nulls}"
    if source_key in rows.columns:
        counted = pa_compute.value_counts(rows.table[source_key]).to_pylist()
        yield "data sources:"
        for each in sorted(counted, key=lambda each: -each["counts"]):
            yield f"  {each['values']}: {each['counts']:,}"


def lengths(rows: DataFiles, prompt_key: str, count: Any = None) -> Iterator[str]:
    """Yield a line with percentiles of the text lengths for each column of texts.

    Args:
        rows: the rows.
        prompt_key: the column of prompts.
        count: a function from texts to their numbers of tokens; None: count characters.
    """
    for name in dict.fromkeys((prompt_key, *ROW_COLUMNS)):
        if name not in rows.columns:
            continue
        found = array("q")
        records = rows.records([name])
        while chunk := [record[name] for _, record in islice(records, CHUNK_ROWS)]:
            found.extend(map(len, map(plain, chunk)) if count is None else count(chunk))
        marks = np.percentile(np.array(found), PERCENTILES, method="nearest")
        said = ", ".join(f"{share}% {mark:,}" for share, mark in zip(PERCENTILES, marks, strict=True))
        yield f"{name}, {'characters' if count is None else 'tokens'}: {said}"


def plain(value: Any) -> str:
    """Return a value of a row as readable text, with one paragraph per turn of a conversation."""
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in value)
    return value if isinstance(value, str) else repr(value)


def pieces(tokenizer: Any, ids: Sequence[int]) -> Iterator[str]:
    """Yield lines of tokens with their ids, eight per line."""
    tokens = tokenizer.convert_ids_to_tokens(list(ids[:PIECES]))
    shown = [f"{number} {token!r}" for number, token in zip(ids, tokens, strict=False)]
    for at in range(0, len(shown), 8):
        yield "  " + "  ".join(shown[at : at + 8])
    if len(ids) > PIECES:
        yield f"  … and {len(ids) - PIECES:,} more"
