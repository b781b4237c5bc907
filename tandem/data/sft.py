"""Responses to imitate: conversations, or prompts with their responses, tokenised once with a mask of
the tokens that the model learns to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import ChatTemplate
from tandem.data.encoder import Encoder
from tandem.data.encoding import Encoded, encode
from tandem.data.examples import ConversationForm, ExampleForm, PairForm, TextForm
from tandem.data.files import DataFiles, read_files
from tandem.data.loader import Prefix, uids
from tandem.data.truncation import Limit
from tandem.protocol import DataProto, Ragged

_KEYS = ("data.messages_key", "data.prompt_key", "data.response_key", "data.text_key")
_TOOLS, _RESPONSE, _COMPLETION = "tools", "response", "completion"
"""Names of columns; the last is TRL's of responses."""


@dataclass(frozen=True)
class Columns:
    """The names of the columns of examples; see `SFTDataset`."""

    messages_key: str
    prompt_key: str
    response_key: str
    text_key: str
    tools_key: str | None

    @property
    def responses(self) -> tuple[str, ...]:
        """The names of the column of responses, the first that is there counts."""
        return (_RESPONSE, _COMPLETION) if self.response_key == _RESPONSE else (self.response_key,)

    @property
    def alternatives(self) -> list[tuple[str, ...]]:
        """The sets of columns, one of which must be there; the first that is there counts."""
        pairs = ((self.prompt_key, name) for name in self.responses)
        return [(self.messages_key,), *pairs, (self.text_key,)]

    @property
    def optional(self) -> tuple[str, ...]:
        """The columns that are read too, where they are there."""
        return () if self.tools_key is None else (self.tools_key,)

    def form(self, files: DataFiles) -> ConversationForm | PairForm | TextForm:
        """Return the form of the rows of files, of which one of the alternatives was read.

        Raises:
            DataError: a column of tools that was named is missing.
        """
        tools = self.tools_key if self.tools_key in files.columns else None
        if tools is None and self.tools_key not in (None, _TOOLS):
            read_files([str(path) for path in files.paths], (self.tools_key,), keys=("data.tools_key",))
        if self.messages_key in files.columns:
            return ConversationForm(self.messages_key, tools)
        for name in self.responses:
            if name in files.columns:
                return PairForm(self.prompt_key, name, are_text(files, [name]), tools)
        return TextForm(self.text_key)


class SFTDataset:
    """The sequences of one or several data files.

    A row has one of these; the first that the files have counts:

    - messages, a list of {role, content} of which the assistant's turns are learnt;
    - a prompt (messages, or text taken as already formatted) and a response: text, or, after messages,
      messages of which the assistant's turns are learnt;
    - a text, of which everything is learnt.

    The end-of-sequence token is put after texts, and learnt. Messages become several sequences where the
    template shows earlier turns otherwise once others follow; see `tandem.data.turns.examples`.

    Args:
        files: parquet or .jsonl paths.
        tokenizer: a Hugging Face tokenizer.
        messages_key: the column of conversations.
        prompt_key: the column of prompts.
        response_key: the column of responses. Files without "response" may have "completion".
        text_key: the column of texts.
        tools_key: the column of the tools that the template of messages is given; "tools" may be missing.
        cache_dir: see `read_files`.
        options: see `encode_learnt`.

    Attributes:
        tokens: Ragged int32, one row per sequence.
        response_mask: Ragged bool, aligned with `tokens`; false for each first token, which nothing precedes.
        digests: (N) uint64, of the row of each sequence.

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
        response_key: str = _RESPONSE,
        text_key: str = "text",
        tools_key: str | None = _TOOLS,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        columns = Columns(messages_key, prompt_key, response_key, text_key, tools_key)
        table = read_files(
            files,
            *columns.alternatives,
            optional=columns.optional,
            keys=_KEYS,
            cache_dir=cache_dir,
        )
        made = encode_learnt(table, tokenizer, columns.form(table), cache_dir=cache_dir, **options)
        self.digests, self._rows = made.digests, made.kept
        self.tokens, self.response_mask = written(made)

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: Sequence[int], *, uid_prefix: Prefix) -> DataProto:
        """A table of the named sequences: batch tokens (Ragged int64), response_mask (Ragged bool);
        non-tensor uid ("{uid_prefix}-{sequence}") and index (its row's number in the files together)."""
        rows = list(rows)
        return DataProto(
            {"tokens": self.tokens[rows].to(torch.int64), "response_mask": self.response_mask[rows]},
            {"uid": uids(uid_prefix, rows), "index": self._rows[rows].tolist()},
        )


def are_text(files: DataFiles, columns: Sequence[str]) -> bool:
    """Return whether these columns hold texts, by the first row."""
    (first,) = files.take([0])
    return all(isinstance(first[key], str) for key in columns)


def encode_learnt(
    table: DataFiles,
    tokenizer: PreTrainedTokenizerBase,
    form: ExampleForm,
    *,
    max_length: int = 1024,
    truncation: str = "error",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    workers: int | None = None,
    cache_dir: str | None = None,
) -> Encoded:
    """Return the tokens of examples to learn from.

    Args:
        table: the rows.
        tokenizer: a Hugging Face tokenizer.
        form: what stands in a row.
        max_length: tokens at most.
        truncation: what happens to longer rows: "error", or the part to cut: "left", "right", "middle".
        chat_template_kwargs: further variables of the chat template.
        workers, cache_dir: see `tandem.data.encoding.encode`.
    """
    template = ChatTemplate(tokenizer, chat_template_kwargs)
    limit = Limit(max_length, "data.max_length", truncation)
    encoder = Encoder(form, tokenizer, template, limit, ended=form.texts, learnt=True)
    return encode(table, encoder, workers=workers, cache_dir=cache_dir)


def written(made: Encoded) -> tuple[Ragged, Ragged]:
    """The ids of sequences, and which of them the model is to write."""
    tokens = Ragged.from_lengths(torch.from_numpy(made.ids), torch.from_numpy(made.lengths))
    return tokens, tokens.with_values(torch.from_numpy(made.masks))
