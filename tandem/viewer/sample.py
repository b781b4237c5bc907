"""Read one sample: its prompt as turns, and its tokens with all values per token."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from tandem.errors import ConfigError
from tandem.observability.inside import inside
from tandem.observability.reading import Run
from tandem.texts import parse_json

LONGEST = 50_000  # characters of a text on the page; the export has the whole text
WINDOW = 4_000  # tokens in one answer
COLUMNS = 64  # columns that are shown, for each of the two kinds: per token and per sample
TURNS = 1_000
CHARACTERS = 1_000_000  # characters of all turns of a sample together
GROUP = 32  # samples of a prompt's group in one answer
_TOKEN = 200  # characters of a token
_TEXTS = ("response_text", "messages", "scores")
_LACKING = {
    "difference": "training did not recompute log-probs in this run (old_log_probs)",
    "ratio": "training did not recompute log-probs in this run (old_log_probs)",
    "entropy": "it is recorded only if training recomputes log-probs",
}
"""A dict from a value per token to the reason why a run may lack this value."""


def whole(run: Run, path: Path, row: int, start: int) -> dict[str, Any]:
    """Return a sample with all values in its file.

    Args:
        run: the run.
        path: the file.
        row: the row of the sample in the file.
        start: the first token to return. At most `WINDOW` tokens are returned.
    """
    table = pq.read_table(inside(path, run.path))
    table.validate(full=True)
    one = table.slice(row, 1)
    single = [
        field.name
        for field in table.schema
        if not pa.types.is_nested(field.type) and field.name not in _TEXTS
    ]
    response = str(one["response_text"][0].as_py() or "")
    return {
        "facts": {name: _plain(one[name][0].as_py()) for name in single[:COLUMNS]},
        "score": _plain(one["scores"][0].as_py()),
        "turns": _turns(one["messages"][0].as_py() if "messages" in table.column_names else None),
        "response": _cut(response),
        "characters": len(response),
        **_tokens(one, run, start),
    }


def _turns(messages: Any) -> list[dict[str, str]]:
    """Return the prompt's messages. Fields other than role and content, such as tool calls, become JSON."""
    turns: Sequence[Mapping[str, Any]] = parse_json(messages) if isinstance(messages, str) else messages or ()
    found = []
    for turn in turns[:TURNS]:
        more = {name: value for name, value in turn.items() if name not in ("role", "content") and value}
        content = turn.get("content")
        text = content if isinstance(content, str) else _json(content)
        found.append(_turn(str(turn.get("role") or "prompt"), text, _json(more) if more else ""))
    return _fewer(found, len(turns))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _turn(role: str, text: str, more: str = "") -> dict[str, str]:
    return {"role": _cut(role), "text": _cut(text), "more": _cut(more)}


def _fewer(turns: list[dict[str, str]], total: int) -> list[dict[str, str]]:
    """Return the first turns whose texts fit into `CHARACTERS`, and a note with the number of other turns."""
    lengths = accumulate(sum(map(len, turn.values())) for turn in turns)
    shown = [turn for turn, length in zip(turns, lengths, strict=True) if length <= CHARACTERS]
    if left := total - len(shown):
        shown.append(_turn("", f"[{left:,} more turns; the export has them]"))
    return shown


def _tokens(one: pa.Table, run: Run, start: int) -> dict[str, Any]:
    """Return the tokens from `start` on, the columns with a value per token, and the response's turns."""
    lacking = dict(_LACKING)
    try:
        words = tokenizer(run)
    except ConfigError as error:  # the model's path uses a variable that is not set here
        words, lacking["text"] = None, str(error)
    ids = one["tokens"][0].as_py() or []
    shown = ids[start : start + WINDOW]
    columns: dict[str, list[float | None]] = {}
    for name in one.column_names:
        cell = one[name][0]
        if name == "tokens" or not isinstance(cell, pa.ListScalar) or len(columns) == COLUMNS:
            continue
        values = cell.values
        if values is not None and len(values) == len(ids) and pa.types.is_primitive(values.type):
            columns[name] = _plain(values.slice(start, WINDOW).to_pylist())
    old, rollout = columns.get("old_log_probs"), columns.get("rollout_log_probs")
    if old and rollout:
        gaps = np.array(old, float) - np.array(rollout, float)
        columns["difference"] = _plain(gaps.tolist())
        columns["ratio"] = _plain(np.exp(np.minimum(gaps, 700)).tolist())
    texts = ["" if words is None else _piece(words, token) for token in shown]
    return {
        "tokens": {"start": start, "total": len(ids), "ids": shown, "texts": texts},
        "columns": columns,
        "lacking": {name: why for name, why in lacking.items() if name not in columns},
        "decoded": words is not None,
        "answered": _answered(ids, one["response_mask"][0].as_py() or [], words),
    }


def _answered(ids: list[int], mask: list[bool], words: Tokenizer | None) -> list[dict[str, str]]:
    """Return the response as turns if some of its tokens come from a tool or environment, else []."""
    if len(ids) != len(mask):
        raise ValueError(f"the sample has {len(ids)} tokens, but its response_mask has {len(mask)} entries")
    by = np.array(mask, bool)
    edges = [0, *(np.flatnonzero(np.diff(by)) + 1).tolist(), len(ids)]
    if ids and not by[0]:
        edges.pop(0)  # skip the prompt
    if words is None or len(edges) < 3:
        return []
    turns = [
        _turn("assistant" if by[start] else "tool", words.decode(ids[start:end]))
        for start, end in pairwise(edges[: TURNS + 1])
    ]
    return _fewer(turns, len(edges) - 1)


def tokenizer(run: Run) -> Tokenizer | None:
    """Return the tokenizer of a run's model, from the model's folder or the Hugging Face cache.

    Return None if the folder is missing, or has no tokenizer.json.
    """
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
    except Exception:  # the library raises no narrower class; the page then shows token ids
        return None


def _piece(words: Tokenizer, token: int) -> str:
    """Return the text of one token; for a part of a character, the token's name in the vocabulary."""
    if not 0 <= token < 2**32:
        return ""
    text: str = words.decode([token], skip_special_tokens=False)
    return (text if text and "\ufffd" not in text else words.id_to_token(token) or "")[:_TOKEN]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… [{len(text) - LONGEST:,} more characters]"


def _plain(value: Any) -> Any:
    """Convert a value to types that JSON can represent."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, int) else _cut(str(value))
