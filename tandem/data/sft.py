"""Responses to imitate: conversations, or prompts with their responses, tokenised once with a mask of
the tokens that the model learns to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import ChatTemplate
from tandem.data.files import DataFiles, read_files
from tandem.data.reader import RowCheck, check_rows, read_sequences
from tandem.data.truncation import Limit
from tandem.data.validate import conversation_problem, kind, prompt_problem
from tandem.protocol import DataProto

_KEYS = ("data.messages_key", "data.prompt_key", "data.response_key")


class SFTDataset:
    """The sequences of one or several data files.

    A row has either messages, a list of {role, content} of which the assistant's turns are learnt, or a
    prompt (messages, or text taken as already formatted) and a response, which is learnt together
    with the end-of-sequence token put after it.

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
        limit = Limit(max_length, "data.max_length", truncation)
        columns = (messages_key,), (prompt_key, response_key)
        table = read_files(files, *columns, max_samples=max_samples, keys=_KEYS)
        template = ChatTemplate(tokenizer, chat_template_kwargs)
        whole = messages_key in table.columns
        if whole:
            _check_conversations(table, messages_key)
            pieces = template.rows(table, messages_key, template.pieces)
        else:
            _check_pairs(table, prompt_key, response_key)
            prompts = template.rows(table, prompt_key, template.prompt_text)
            responses = [record[response_key] for _, record in table.records([response_key])]
            pieces = [[(p, False), (r, True)] for p, r in zip(prompts, responses, strict=True)]
        self.tokens, self.response_mask = read_sequences(table, tokenizer, pieces, limit, ended=not whole)

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


def _check_conversations(files: DataFiles, key: str) -> None:
    check_rows(
        files,
        conversation_check(key),
        columns=[key],
        expected=f"{key}: [{{role, content}}, …] with a turn of the assistant that is not the first",
    )


def conversation_check(key: str) -> RowCheck:
    """Looks at a row's conversation."""
    return lambda row: f"{key}: {problem}" if (problem := turns_problem(row[key])) else None


def turns_problem(messages: Any) -> str | None:
    """Names what keeps `messages` from being a conversation in which the assistant answers."""
    if problem := conversation_problem(messages):
        return problem
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant":
        return "the assistant speaks first"
    return None if "assistant" in roles else "no turn of the assistant"


def pair_check(prompt_key: str, response_key: str) -> RowCheck:
    """Looks at a row's prompt and its response."""

    def problem(row: dict[str, Any]) -> str | None:
        if prompt := prompt_problem(row[prompt_key]):
            return f"{prompt_key}: {prompt}"
        response = row[response_key]
        return None if isinstance(response, str) else f"{response_key}: {kind(response)}, not text"

    return problem


def _check_pairs(files: DataFiles, prompt_key: str, response_key: str) -> None:
    problem = pair_check(prompt_key, response_key)
    expected = f"{prompt_key}: [{{role, content}}, …] or text; {response_key}: text"
    check_rows(files, problem, columns=[prompt_key, response_key], expected=expected)
