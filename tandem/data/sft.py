"""Responses to imitate: conversations, or prompts with their responses, tokenised once with a mask of
the tokens that the model learns to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import ChatTemplate, Message, Piece, format_rows, tokenize
from tandem.data.files import DataFiles, read_files
from tandem.data.truncation import check_truncation, cut, refuse_long
from tandem.data.validate import RowProblems, conversation_problem, kind, prompt_problem
from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged


class SFTDataset:
    """The sequences of one or several data files.

    A row has either messages, a list of {role, content} of which the assistant's turns are learnt, or a
    prompt (messages, or text taken as already formatted) and a response, which is learnt together
    with the end-of-sequence token put after it. The pieces between which the mask changes are
    tokenised separately, as they are when the model answers.

    Args:
        files: parquet or .jsonl paths.
        tokenizer: a Hugging Face tokenizer.
        messages_key: the column of conversations; if the files have it, it is used.
        prompt_key: the column of prompts.
        response_key: the column of responses.
        max_length: tokens at most.
        truncation: what happens to longer rows: "error", or the part to cut: "left", "right", "middle".
        max_samples: use the first so many rows; -1 uses all.
        chat_template_kwargs: further variables of the chat template.

    Attributes:
        tokens: Ragged int32, one row per sequence.
        response_mask: Ragged bool, aligned with `tokens`; false for each first token, which nothing precedes.

    Raises:
        DataError: anything wrong with the files or their rows; says which file, which rows, and what.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        messages_key: str = "messages",
        prompt_key: str = "prompt",
        response_key: str = "response",
        max_length: int = 1024,
        truncation: str = "error",
        max_samples: int = -1,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_truncation(truncation)
        table = read_files(files, (messages_key,), (prompt_key, response_key), max_samples=max_samples)
        template = ChatTemplate(tokenizer, chat_template_kwargs)
        end: tuple[int, ...] = ()
        if messages_key in table.columns:
            _check_conversations(table, messages_key)
            pieces = format_rows(table, messages_key, template.pieces)
        else:
            end = (_eos(tokenizer),)
            _check_pairs(table, prompt_key, response_key)
            prompts = format_rows(table, prompt_key, template.prompt_text)
            responses = [record[response_key] for _, record in table.records([response_key])]
            pieces = [[(p, False), (r, True)] for p, r in zip(prompts, responses, strict=True)]
        tokens, masks = _tokenized(tokenizer, pieces, end)
        lengths = np.array([len(row) for row in tokens])
        if truncation == "error":
            refuse_long(lengths, max_length, table.where, field="data.max_length")
        tokens = [cut(row, max_length, truncation) for row in tokens]
        masks = [cut(row, max_length, truncation) for row in masks]
        for mask in masks:
            mask[:1] = False
        _require_response(table, masks, max_length)
        self.tokens = Ragged.from_lengths(torch.from_numpy(np.concatenate(tokens)), [len(t) for t in tokens])
        self.response_mask = self.tokens.with_values(torch.from_numpy(np.concatenate(masks)))

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: Sequence[int], *, uid_prefix: str) -> DataProto:
        """A table of the named rows: batch tokens (Ragged int64), response_mask (Ragged bool);
        non-tensor uid ("{uid_prefix}-{row}") and index (the row's number in the files together)."""
        rows = list(rows)
        return DataProto(
            {"tokens": self.tokens[rows].to(torch.int64), "response_mask": self.response_mask[rows]},
            {"uid": [f"{uid_prefix}-{row}" for row in rows], "index": rows},
        )


def _tokenized(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[Piece]], end: tuple[int, ...]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(T_i) int32 token ids of each row, with `end` after its last piece, and (T_i) bool: what is learnt."""
    ids = iter(tokenize(tokenizer, [text for pieces in rows for text, _ in pieces]))
    tokens: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for pieces in rows:
        parts = [(next(ids), learnt) for _, learnt in pieces]
        parts.append((np.array(end, dtype=np.int32), True))
        tokens.append(np.concatenate([part for part, _ in parts]))
        masks.append(np.concatenate([np.full(len(part), learnt) for part, learnt in parts]))
    return tokens, masks


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


def _check_conversations(files: DataFiles, key: str) -> None:
    problems = RowProblems(files.where)
    for row, record in files.records([key]):
        problem = conversation_problem(record[key]) or _turns_problem(record[key])
        if problem:
            problems.add(row, f"{key}: {problem}")
    problems.raise_if_any(
        "of the wrong shape",
        field=files.names,
        expected=f"{key}: [{{role, content}}, …] with a turn of the assistant that is not the first",
        remedy="mend or remove these rows; rows are counted from 0",
    )


def _turns_problem(messages: Sequence[Message]) -> str | None:
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant":
        return "the assistant speaks first"
    return None if "assistant" in roles else "no turn of the assistant"


def _check_pairs(files: DataFiles, prompt_key: str, response_key: str) -> None:
    problems = RowProblems(files.where)
    for row, record in files.records([prompt_key, response_key]):
        prompt = prompt_problem(record[prompt_key])
        if prompt:
            problems.add(row, f"{prompt_key}: {prompt}")
        elif not isinstance(record[response_key], str):
            problems.add(row, f"{response_key}: {kind(record[response_key])}, not text")
    problems.raise_if_any(
        "of the wrong shape",
        field=files.names,
        expected=f"{prompt_key}: [{{role, content}}, …] or text; {response_key}: text",
        remedy="mend or remove these rows; rows are counted from 0",
    )


def _require_response(files: DataFiles, masks: Sequence[np.ndarray], limit: int) -> None:
    problems = RowProblems(files.where)
    for row, mask in enumerate(masks):
        if not mask.any():
            problems.add(row, f"none of its {len(mask)} tokens is learnt")
    problems.raise_if_any(
        "with nothing left to learn once cut to the length limit",
        field=files.names,
        expected=f"at least one token of the response among {limit}",
        remedy="raise data.max_length, or cut the other side with data.truncation",
    )
