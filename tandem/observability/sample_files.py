"""Read samples files as one dict per sample, with texts, scores and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tandem.errors import DataError
from tandem.texts import parse_json

NEEDED = ("scores", "response_text", "response_mask")
"""Columns that every samples file has."""
_AS_THEY_ARE = ("uid", "sample", "data_source", "ground_truth", "finish_reason")
_RENAMED = ("response_text", "scores", "reward_extra", "reward_why")
_MASK = "response_mask"


def read(path: Path, *, tokens: bool) -> Iterator[dict[str, Any]]:
    """Yield the samples of one file; see `Run.samples`.

    Args:
        path: the file.
        tokens: add the other columns unchanged.

    Raises:
        DataError: If the file is not a parquet file, or lacks a column of `NEEDED`.
    """
    wanted = (*_AS_THEY_ARE, *_RENAMED, "messages", _MASK)
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        missing = [name for name in NEEDED if name not in names]
        if missing:
            raise pa.ArrowInvalid(f"it has no column {', '.join(missing)}")
        table = file.read(columns=[name for name in names if tokens or name in wanted])
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            "this samples file cannot be read",
            field=str(path),
            got=str(error).splitlines()[0],
            expected="a parquet file that a run of Tandem wrote",
            remedy="move the file out of the run's folder",
        ) from error
    mask = table[_MASK].combine_chunks()
    lengths = pc.list_value_length(mask).to_pylist()
    written = pc.value_counts(pc.list_parent_indices(mask).filter(mask.flatten()))
    responses = {entry["values"]: entry["counts"] for entry in written.to_pylist()}
    rows = table.to_pylist() if tokens else table.drop_columns([_MASK]).to_pylist()
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        written_tokens = responses.get(number, 0)
        rest = {name: value for name, value in row.items() if tokens and name not in _RENAMED}
        yield {
            **{name: row.get(name) for name in _AS_THEY_ARE},
            "prompt": conversation(row.get("messages")),
            "response": row["response_text"],
            "score": row["scores"],
            "extra": parse_json(row.get("reward_extra") or "{}"),
            "why": row.get("reward_why") or "",
            "prompt_tokens": length - written_tokens,
            "response_tokens": written_tokens,
            **rest,
        }


def conversation(messages: Sequence[Mapping[str, Any]] | str | None) -> str:
    """Return messages as text, with the role before each message. A plain-text prompt has no role.

    Args:
        messages: the value of the column in a samples file: messages, JSON text of messages, or None.
    """
    turns: Sequence[Mapping[str, Any]] = parse_json(messages) if isinstance(messages, str) else messages or ()
    return "\n".join(
        f"{turn['role']}: {turn['content']}" if turn["role"] else str(turn["content"]) for turn in turns
    )
