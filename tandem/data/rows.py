"""Rows to answer outside of training: all columns of the data files, and each row's prompt as tokens; and
the files that rows are written to, with what was added to them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import ChatTemplate, format_rows, tokenize
from tandem.data.files import DataFiles, read_files
from tandem.data.truncation import check_truncation, cut, refuse_long
from tandem.data.validate import RowProblems, prompt_problem
from tandem.errors import DataError


class PromptRows:
    """The prompts of one or several data files.

    Args:
        files: parquet or .jsonl paths.
        tokenizer: a Hugging Face tokenizer.
        prompt_key: the column of prompts, each a list of {role, content} (formatted with the tokenizer's
            chat template), a text (taken as already formatted), or a list of token ids.
        needs: further columns that must be there.
        max_prompt_length, truncation, filter_overlong_prompts, max_samples, chat_template_kwargs: see
            `tandem.data.prompts.PromptDataset`.

    Attributes:
        table: all columns of the rows that were kept.
        where: the number of one of them to its name in messages.
        prompts: (T_i) int64 token ids of each of them.
        dropped: how many rows were left out for their length.

    Raises:
        DataError: anything wrong with the files or their rows; says which file, which rows, and what.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        needs: Sequence[str] = (),
        max_prompt_length: int = 512,
        truncation: str = "error",
        filter_overlong_prompts: bool = False,
        max_samples: int = -1,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_truncation(truncation)
        read = read_files(files, (prompt_key, *needs), optional=None, max_samples=max_samples)
        prompts = _tokens(read, prompt_key, tokenizer, ChatTemplate(tokenizer, chat_template_kwargs))
        lengths = np.array([len(ids) for ids in prompts])
        kept = np.arange(len(prompts))
        if filter_overlong_prompts:
            kept = np.flatnonzero(lengths <= max_prompt_length)
        elif truncation == "error":
            refuse_long(lengths, max_prompt_length, read.where, field="data.max_prompt_length")
        self.dropped = len(prompts) - len(kept)
        if not len(kept):
            raise DataError(
                f"all {len(prompts)} prompts are over the length limit and were filtered out",
                field="data.max_prompt_length",
                got=max_prompt_length,
                expected=f"at least {lengths.min()}, the length of the shortest",
            )
        self.table = read.table.take(pa.array(kept)) if self.dropped else read.table
        self.where: Callable[[int], str] = lambda row: read.where(int(kept[row]))
        self.prompts = [cut(prompts[row], max_prompt_length, truncation) for row in kept]

    def __len__(self) -> int:
        return len(self.prompts)


def _tokens(
    files: DataFiles, prompt_key: str, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate
) -> list[np.ndarray]:
    """(T_i) int64 of each row."""
    problems = RowProblems(files.where)
    kind = files.table.schema.field(prompt_key).type
    given_ids = pa.types.is_list(kind) and pa.types.is_integer(kind.value_type)
    for row, record in files.records([prompt_key]):
        problem = _ids_problem(record[prompt_key]) if given_ids else prompt_problem(record[prompt_key])
        if problem:
            problems.add(row, f"{prompt_key}: {problem}")
    problems.raise_if_any(
        "of the wrong shape",
        field=files.names,
        expected=f"{prompt_key}: [{{role, content}}, …], text, or token ids",
        remedy="mend or remove these rows; rows are counted from 0",
    )
    if given_ids:
        prompts = [np.array(record[prompt_key]) for _, record in files.records([prompt_key])]
    else:
        prompts = tokenize(tokenizer, format_rows(files, prompt_key, template.prompt_text))
    for row, ids in enumerate(prompts):
        if not len(ids):
            problems.add(row, "no tokens")
    problems.raise_if_any(
        "whose prompt has no tokens",
        field=files.names,
        expected="prompts of at least one token",
        remedy="remove these rows, or check the chat template, which writes nothing for them",
    )
    return [ids.astype(np.int64) for ids in prompts]


def _ids_problem(value: Any) -> str | None:
    if not value or None in value:
        return "not a list of at least one token id"
    return None if min(value) >= 0 else f"a negative token id, {min(value)}"


def check_new_columns(table: pa.Table, names: Sequence[str]) -> None:
    """
    Raises:
        DataError: the table has one of these columns already.
    """
    clash = [name for name in names if name in table.column_names]
    if clash:
        raise DataError(
            "the data have a column of a name that the output needs",
            field=clash[0],
            got=f"columns {', '.join(table.column_names)}",
            remedy="rename it in the data file",
        )


def write_rows(path: Path, table: pa.Table, columns: Mapping[str, pa.Array]) -> None:
    """A file of the table's columns and further ones, whole or, after a crash, not there.

    Args:
        path: `.parquet` or `.jsonl`; replaced if it is there.
        columns: one entry per row each.
    """
    for name, column in columns.items():
        table = table.append_column(name, column)
    partial = path.with_name(path.name + ".partial")
    if path.suffix == ".parquet":
        pa_parquet.write_table(table, partial)
    else:
        with partial.open("w", encoding="utf-8") as file:
            for batch in table.to_batches(max_chunksize=1024):
                file.writelines(json_line(row) + "\n" for row in batch.to_pylist())
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def json_line(row: Mapping[str, Any]) -> str:
    """One line of JSON; dates, times and decimals become text.

    Raises:
        TypeError: something that JSON does not know, such as bytes.
    """
    return json.dumps(row, ensure_ascii=False, default=_as_text)


def _as_text(value: Any) -> str:
    if isinstance(value, datetime | date | time | Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
