"""The dataset of supervised fine-tuning: conversations, or prompts with responses.

Examples are tokenized once, with a mask of the tokens that the model learns to generate.
"""

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
"""Names of columns. `_COMPLETION` is TRL's name for the column of responses."""


@dataclass(frozen=True)
class Columns:
    """The names of the columns of examples; `SFTDataset` describes the columns."""

    messages_key: str
    prompt_key: str
    response_key: str
    text_key: str
    tools_key: str | None

    @property
    def responses(self) -> tuple[str, ...]:
        """The possible names of the response column. The first name that exists is used."""
        return (_RESPONSE, _COMPLETION) if self.response_key == _RESPONSE else (self.response_key,)

    @property
    def alternatives(self) -> list[tuple[str, ...]]:
        """Alternative sets of columns. The first set that exists is used."""
        pairs = ((self.prompt_key, name) for name in self.responses)
        return [(self.messages_key,), *pairs, (self.text_key,)]

    @property
    def optional(self) -> tuple[str, ...]:
        """Additional columns, which are read if they exist."""
        return () if self.tools_key is None else (self.tools_key,)

    def form(self, files: DataFiles) -> ConversationForm | PairForm | TextForm:
        """Return the form of the rows of files, according to the columns that the files have.

        Raises:
            DataError: The named column of tools is missing.
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
    """The training sequences of one or several data files.

    A row has one of the following; the first alternative that the files have is used:

    - messages, a list of {role, content}: the model learns the assistant's turns;
    - a prompt (messages, or formatted text) and a response. The response is text or, after a prompt of
      messages, a list of messages in which the model learns the assistant's turns;
    - a text, which the model learns completely.

    The end-of-sequence token is added to texts, and the model learns this token. Some templates render
    earlier turns differently once other turns follow. With such templates, one row of messages becomes
    several sequences; see `tandem.data.turns.examples`.

    Args:
        files: Paths of parquet or .jsonl files.
        tokenizer: A Hugging Face tokenizer.
        messages_key: The column of conversations.
        prompt_key: The column of prompts.
        response_key: The column of responses. Files without "response" may have "completion".
        text_key: The column of texts.
        tools_key: The column of tools for the chat template. A column called "tools" may be missing.
        cache_dir: The cache folder; see `read_files`.
        options: See `encode_learnt`.

    Attributes:
        tokens: Ragged int32, one row per sequence.
        response_mask: Ragged bool, aligned with `tokens`. The first token of a sequence is always false,
            because no token comes before it.
        digests: (N) uint64, a digest of each sequence's row.

    Raises:
        DataError: Something is wrong with the files or their rows. The error names the file, the rows and the
            problem.
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
        self.tokens, self.response_mask = tokens_and_mask(made)

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: Sequence[int], *, uid_prefix: Prefix) -> DataProto:
        """Return a table of the sequences with the given numbers.

        Returns:
            batch tokens (Ragged int64) and response_mask (Ragged bool); non-tensor uid
            ("{uid_prefix}-{sequence}") and index (the row's number in the files together).
        """
        rows = list(rows)
        return DataProto(
            {"tokens": self.tokens[rows].to(torch.int64), "response_mask": self.response_mask[rows]},
            {"uid": uids(uid_prefix, rows), "index": self._rows[rows].tolist()},
        )


def are_text(files: DataFiles, columns: Sequence[str]) -> bool:
    """Return whether the columns contain texts in the first row."""
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
    """Tokenize training examples, apply the length limit, and return the tokens.

    Args:
        table: The rows.
        tokenizer: A Hugging Face tokenizer.
        form: The form of the rows.
        max_length: The largest number of tokens of a sequence.
        truncation: The treatment of longer sequences: "error", or the part that is cut off: "left", "right"
            or "middle".
        chat_template_kwargs: Additional variables of the chat template.
        workers: The number of processes; see `tandem.data.encoding.encode`.
        cache_dir: The cache folder; see `tandem.data.encoding.encode`.
    """
    template = ChatTemplate(tokenizer, chat_template_kwargs)
    limit = Limit(max_length, "data.max_length", truncation)
    encoder = Encoder(form, tokenizer, template, limit, ended=form.texts, learnt=True)
    return encode(table, encoder, workers=workers, cache_dir=cache_dir)


def tokens_and_mask(made: Encoded) -> tuple[Ragged, Ragged]:
    """Return the token ids of sequences, and a mask of the tokens that the model learns to generate."""
    tokens = Ragged.from_lengths(torch.from_numpy(made.ids), torch.from_numpy(made.lengths))
    return tokens, tokens.with_values(torch.from_numpy(made.masks))
