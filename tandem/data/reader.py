"""From data files to token ids, the same way for every use: rows are checked, formatted by the chat template,
tokenised, and kept to a length limit. What is wrong is said of all rows at once, with their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import TEMPLATE_KEY, ChatTemplate, Piece, tokenize
from tandem.data.files import DataFiles, read_files
from tandem.data.truncation import Limit
from tandem.data.validate import RowProblems, prompt_problem
from tandem.errors import DataError
from tandem.protocol import Ragged

RowCheck = Callable[[dict[str, Any]], str | None]
"""A row to what is wrong with it, None if nothing is."""


class PromptRows:
    """The prompts of one or several data files.

    Args:
        files: parquet or .jsonl paths.
        tokenizer: a Hugging Face tokenizer.
        prompt_key: the column of prompts, each a list of {role, content} (formatted with the tokenizer's
            chat template), a text (taken as already formatted), or a list of token ids.
        needs: further columns that must be there.
        optional: columns that are read where they are there; None: all others.
        check: looks at the other columns of a row.
        expected: what `check` wants, in words.
        max_prompt_length: tokens at most, the template's included.
        truncation: what happens to longer prompts: "error", or the part to cut: "left", "right", "middle".
        filter_overlong_prompts: drop longer prompts instead.
        max_samples: use the first so many rows; -1 uses all.
        chat_template_kwargs: further variables of the chat template.
        column_keys, template_key: config keys that name the columns and the chat template, for messages.

    Attributes:
        files: the rows of all files.
        kept: (K) int64, the numbers of the rows that were kept.
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
        optional: Sequence[str] | None = None,
        check: RowCheck = lambda row: None,
        expected: str = "",
        max_prompt_length: int = 512,
        truncation: str = "error",
        filter_overlong_prompts: bool = False,
        max_samples: int = -1,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        column_keys: Sequence[str] = ("data.prompt_key",),
        template_key: str = TEMPLATE_KEY,
    ) -> None:
        limit = Limit(max_prompt_length, "data.max_prompt_length", truncation, filter_overlong_prompts)
        columns = (prompt_key, *needs)
        self.files = read_files(files, columns, optional=optional, max_samples=max_samples, keys=column_keys)
        as_ids = holds_ids(self.files, prompt_key)
        check_rows(
            self.files,
            prompt_check(prompt_key, check, as_ids=as_ids),
            expected=f"{prompt_key}: [{{role, content}}, …], text, or token ids{expected and '; '}{expected}",
        )
        if as_ids:
            prompts = [np.array(record[prompt_key]) for _, record in self.files.records([prompt_key])]
        else:
            template = ChatTemplate(tokenizer, chat_template_kwargs, template_key)
            prompts = tokenize(tokenizer, template.rows(self.files, prompt_key, template.prompt_text))
        _refuse_empty(self.files, prompts)
        self.kept = limit.kept(np.array([len(ids) for ids in prompts]), self.files)
        self.prompts = [limit.cut(prompts[row]).astype(np.int64) for row in self.kept]
        self.dropped = len(prompts) - len(self.kept)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def table(self) -> pa.Table:
        """All columns read, of the rows that were kept."""
        return self.files.table.take(pa.array(self.kept)) if self.dropped else self.files.table

    def where(self, row: int) -> str:
        """The name in messages of one of the rows that were kept."""
        return self.files.where(int(self.kept[row]))


def prompt_check(prompt_key: str, check: RowCheck, *, as_ids: bool) -> RowCheck:
    """Looks at a row's prompt, of token ids or not, then at the rest with `check`."""
    problem = _ids_problem if as_ids else prompt_problem
    return lambda row: f"{prompt_key}: {wrong}" if (wrong := problem(row[prompt_key])) else check(row)


def holds_ids(files: DataFiles, prompt_key: str) -> bool:
    """Whether the prompts are lists of token ids."""
    kind = files.table.schema.field(prompt_key).type
    return bool(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type))


def _ids_problem(value: Any) -> str | None:
    if not value or None in value:
        return "not a list of at least one token id"
    return None if min(value) >= 0 else f"a negative token id, {min(value)}"


def _refuse_empty(files: DataFiles, prompts: Sequence[np.ndarray]) -> None:
    problems = RowProblems(files.where)
    for row, ids in enumerate(prompts):
        if not len(ids):
            problems.add(row, "no tokens")
    problems.raise_if_any(
        "whose prompt has no tokens",
        field=files.names,
        expected="prompts of at least one token",
        remedy="remove these rows, or check the chat template, which writes nothing for them",
    )


def check_rows(
    files: DataFiles, check: RowCheck, *, expected: str, columns: Sequence[str] | None = None
) -> None:
    """Looks at every row.

    Args:
        expected: what `check` wants, in words.
        columns: those that it looks at; None: all.

    Raises:
        DataError: rows in which `check` finds something.
    """
    problems = RowProblems(files.where)
    for row, record in files.records(columns):
        if problem := check(record):
            problems.add(row, problem)
    problems.raise_if_any(
        "of the wrong shape",
        field=files.names,
        expected=expected,
        remedy="mend or remove these rows; rows are counted from 0",
    )


def read_sequences(
    files: DataFiles,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[Piece]],
    limit: Limit,
    *,
    ended: bool,
) -> tuple[Ragged, Ragged]:
    """The token ids of each row's pieces, and which of them the model is to write. The pieces, between which
    that changes, are tokenised separately, as they are when the model answers.

    Args:
        rows: one of the files' each.
        ended: the end-of-sequence token is put after each row; it is the model's to write.

    Returns:
        ids (T_i) int32 and masks (T_i) bool, a row each; false for each first token, which nothing precedes.

    Raises:
        DataError: rows over the limit, or with no token of the model's left within it; no end token.
    """
    end = np.array([_eos(tokenizer)] if ended else [], dtype=np.int32)
    ids = iter(tokenize(tokenizer, [text for pieces in rows for text, _ in pieces]))
    tokens: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for pieces in rows:
        parts = [(next(ids), written) for _, written in pieces]
        parts.append((end, True))
        tokens.append(np.concatenate([part for part, _ in parts]))
        masks.append(np.concatenate([np.full(len(part), written) for part, written in parts]))
    limit.kept(np.array([len(row) for row in tokens]), files)
    tokens = [limit.cut(row) for row in tokens]
    masks = [limit.cut(row) for row in masks]
    for mask in masks:
        mask[:1] = False
    _require_written(files, masks, limit)
    ids_T, mask_T = (torch.from_numpy(np.concatenate(parts)) for parts in (tokens, masks))
    found = Ragged.from_lengths(ids_T, [len(row) for row in tokens])
    return found, found.with_values(mask_T)


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token to put after responses",
            field="tokenizer.eos_token",
            got=f"None in {tokenizer.name_or_path or type(tokenizer).__name__}",
            expected="an eos_token in tokenizer_config.json",
            remedy="name one there; without it the model would never learn to stop",
        )
    return int(tokenizer.eos_token_id)


def _require_written(files: DataFiles, masks: Sequence[np.ndarray], limit: Limit) -> None:
    problems = RowProblems(files.where)
    for row, mask in enumerate(masks):
        if not mask.any():
            problems.add(row, f"none of its {len(mask)} tokens is learnt")
    problems.raise_if_any(
        "with nothing left to learn once cut to the length limit",
        field=files.names,
        expected=f"at least one token of the response among {limit.tokens}",
        remedy=f"raise {limit.field}, or cut the other side with data.truncation",
    )
