"""Responses to imitate: conversations, or prompts with their responses, tokenised once with a mask of
the tokens that the model learns to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import ChatTemplate
from tandem.data.encoder import Encoder
from tandem.data.encoding import Encoded, encode
from tandem.data.files import read_files
from tandem.data.forms import ConversationForm, PairForm
from tandem.data.loader import Prefix, uids
from tandem.data.truncation import Limit
from tandem.protocol import DataProto, Ragged

_KEYS = ("data.messages_key", "data.prompt_key", "data.response_key")


class SFTDataset:
    """The sequences of one or several data files.

    A row has either messages, a list of {role, content} of which the assistant's turns are learnt, or a
    prompt (messages, or text taken as already formatted) and a response, which is learnt together
    with the end-of-sequence token put after it. Messages become several sequences where the template shows
    earlier turns otherwise once others follow; see `tandem.data.turns.examples`.

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
        tools_key: the column of the tools that conversations' template is given, if any.
        workers, cache_dir: see `tandem.data.encoding.encode` and `read_files`.

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
        response_key: str = "response",
        max_length: int = 1024,
        truncation: str = "error",
        max_samples: int = -1,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools_key: str | None = None,
        workers: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        columns = (messages_key,), (prompt_key, response_key)
        optional = () if tools_key is None else (tools_key,)
        table = read_files(
            files, *columns, optional=optional, max_samples=max_samples, keys=_KEYS, cache_dir=cache_dir
        )
        whole = messages_key in table.columns
        form = ConversationForm(messages_key, tools_key) if whole else PairForm(prompt_key, response_key)
        encoder = Encoder(
            form,
            tokenizer,
            ChatTemplate(tokenizer, chat_template_kwargs),
            Limit(max_length, "data.max_length", truncation),
            ended=not whole,
            learnt=True,
        )
        made = encode(table, encoder, workers=workers, cache_dir=cache_dir)
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


def written(made: Encoded) -> tuple[Ragged, Ragged]:
    """The ids of sequences, and which of them the model is to write."""
    tokens = Ragged.from_lengths(torch.from_numpy(made.ids), torch.from_numpy(made.lengths))
    return tokens, tokens.with_values(torch.from_numpy(made.masks))
