"""One sample whole: its prompt in turns, its tokens with what is known of each, and its group."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from tandem.errors import DataError
from tandem.observability.reading import Run
from tandem.texts import parse_json
from tandem.viewer.index import Part

LONGEST = 50_000
"""Characters of a text on the page; the export has all of them."""
WINDOW = 4_000
"""Tokens of one answer."""
_HELD = ("tokens", "response_mask")
_TEXTS = ("response_text", "messages", "scores")
_LACKING = {
    "difference": "training recomputed no log-probs in this run (old_log_probs)",
    "ratio": "training recomputed no log-probs in this run (old_log_probs)",
    "entropy": "it is recorded where training recomputes log-probs",
}
"""What a reader may look for, and why a run does not have it."""


def whole(run: Run, part: Part, row: int, start: int) -> dict[str, Any]:
    """A sample with everything that its file holds of it.

    Args:
        row: its place in the file.
        start: the first token that is given; `WINDOW` are.

    Raises:
        DataError: the file has no such row.
    """
    table = pq.read_table(part.path)
    if row >= len(table):
        raise DataError("no such sample", field=part.path.name, got=row, expected=f"0 … {len(table) - 1}")
    table.validate(full=True)
    one = table.slice(row, 1)
    single = [
        field.name
        for field in table.schema
        if not pa.types.is_nested(field.type) and field.name not in _TEXTS
    ]
    response = str(one["response_text"][0].as_py() or "")
    return {
        "facts": {name: _plain(one[name][0].as_py()) for name in single},
        "score": _plain(one["scores"][0].as_py()),
        "turns": _turns(one["messages"][0].as_py() if "messages" in table.column_names else None),
        "response": _cut(response),
        "characters": len(response),
        **_tokens(one, tokenizer(run), start),
        "group": _group(table, row),
    }


def _group(table: pa.Table, row: int) -> list[int]:
    """The rows of the samples of the same prompt, in their order."""
    if "uid" not in table.column_names:
        return [row]
    same = pc.equal(table["uid"], table["uid"][row]).to_numpy()
    return [int(number) for number in same.nonzero()[0]] or [row]


def _turns(messages: Any) -> list[dict[str, str]]:
    """The prompt's messages; what one has beside role and content, such as calls of tools, as JSON."""
    turns: Sequence[Mapping[str, Any]] = parse_json(messages) if isinstance(messages, str) else messages or ()
    found = []
    for turn in turns:
        more = {name: value for name, value in turn.items() if name not in ("role", "content") and value}
        content = turn.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
        found.append(
            {
                "role": str(turn.get("role") or "prompt"),
                "text": _cut(text),
                "more": _cut(json.dumps(more, ensure_ascii=False, default=str)) if more else "",
            }
        )
    return found


def _tokens(one: pa.Table, words: Tokenizer | None, start: int) -> dict[str, Any]:
    """The tokens from `start` on, every column that has an entry for each, and the response's turns."""
    ids = one["tokens"][0].as_py() or []
    end = start + WINDOW
    columns: dict[str, list[float | None]] = {}
    for field in one.schema:
        if field.name != "tokens" and _is_list_of_numbers(field.type):
            values = one[field.name][0].values
            if values is not None and len(values) == len(ids):
                columns[field.name] = [_plain(value) for value in values.slice(start, WINDOW).to_pylist()]
    old, rollout = columns.get("old_log_probs"), columns.get("rollout_log_probs")
    if old and rollout:
        gaps = [None if a is None or b is None else a - b for a, b in zip(old, rollout, strict=True)]
        columns["difference"] = [_plain(gap) for gap in gaps]
        columns["ratio"] = [None if gap is None else _plain(math.exp(min(gap, 700))) for gap in gaps]
    texts = ["" if words is None else _piece(words, token) for token in ids[start:end]]
    return {
        "tokens": {"start": start, "total": len(ids), "ids": ids[start:end], "texts": texts},
        "columns": columns,
        "lacking": {name: why for name, why in _LACKING.items() if name not in columns},
        "decoded": words is not None,
        "answered": _answered(ids, one["response_mask"][0].as_py() or [], words),
    }


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    lists: bool = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return lists and any(test(kind.value_type) for test in tests)


def _answered(ids: list[int], mask: list[bool], words: Tokenizer | None) -> list[dict[str, str]]:
    """The response in turns, where something else (a tool, an environment) wrote between its tokens."""
    runs = [(by, [i for i, _ in held]) for by, held in groupby(zip(ids, mask, strict=True), lambda x: x[1])]
    while runs and not runs[0][0]:
        runs.pop(0)  # the prompt
    if words is None or len(runs) < 2:
        return []
    roles = {True: "assistant", False: "tool"}
    return [{"role": roles[bool(by)], "text": _cut(words.decode(held)), "more": ""} for by, held in runs]


def tokenizer(run: Run) -> Tokenizer | None:
    """The tokenizer of a run's model, from its folder or the hub's cache; None where it is not there, or has
    no tokenizer.json."""
    model = "actor_rollout_ref.model."
    name = run.setting(f"{model}tokenizer_path") or run.setting(f"{model}path")
    if not isinstance(name, str) or not name:
        return None
    path = Path(name) / "tokenizer.json"
    if not path.is_file() and not Path(name).is_absolute() and name.count("/") == 1:
        cached = try_to_load_from_cache(name, "tokenizer.json")
        path = Path(cached) if isinstance(cached, str) else path
    return _loaded(path, path.stat().st_mtime_ns) if path.is_file() else None


@lru_cache(maxsize=4)
def _loaded(path: Path, _written: int) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing narrower; ids are shown then
        return None


def _piece(words: Tokenizer, token: int) -> str:
    """The text of one token; of one that is a part of a character, what the vocabulary calls it."""
    if not 0 <= token < 2**32:
        return ""
    text: str = words.decode([token], skip_special_tokens=False)
    return text if text and "\ufffd" not in text else words.id_to_token(token) or ""


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… [{len(text) - LONGEST:,} characters more]"


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, bool | int) or value is None:
        return value
    return _cut(str(value))
