"""Prompts of data files as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import TEMPLATE_KEY, ChatTemplate
from tandem.data.encoder import Encoder
from tandem.data.encoding import encode
from tandem.data.files import DataFiles, read_files
from tandem.data.forms import PromptForm
from tandem.data.truncation import Limit
from tandem.protocol import Ragged


class PromptRows:
    """The prompts of one or several data files.

    Args:
        files: paths of data files.
        tokenizer: a Hugging Face tokenizer.
        form: what stands in a row.
        optional: columns that are read where they are there; None: all others.
        max_prompt_length: tokens at most, the template's included.
        truncation: what happens to longer prompts: "error", or the part to cut: "left", "right", "middle".
        filter_overlong_prompts: drop longer prompts instead.
        max_samples: use the first so many rows; -1 uses all.
        chat_template_kwargs: further variables of the chat template.
        column_keys, template_key: config keys that name the columns and the chat template, for messages.
        workers, cache_dir: see `tandem.data.encoding.encode` and `read_files`.

    Attributes:
        files: the rows of all files.
        form: what stands in a row.
        kept: (K) int64, the numbers of the rows that were kept.
        tokens: Ragged int32, of each of them.
        digests: (K) uint64, of their prompts.
        dropped: how many rows were left out for their length.

    Raises:
        DataError: anything wrong with the files or their rows; says which file, which rows, and what.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        form: PromptForm,
        optional: Sequence[str] | None = None,
        max_prompt_length: int = 512,
        truncation: str = "error",
        filter_overlong_prompts: bool = False,
        max_samples: int = -1,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        column_keys: Sequence[str] = ("data.prompt_key",),
        template_key: str = TEMPLATE_KEY,
        workers: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        limit = Limit(max_prompt_length, "data.max_prompt_length", truncation, filter_overlong_prompts)
        self.files = read_files(
            files,
            form.required,
            optional=optional,
            max_samples=max_samples,
            keys=column_keys,
            cache_dir=cache_dir,
        )
        self.form = replace(form, as_ids=holds_ids(self.files, form.prompt_key))
        template = ChatTemplate(tokenizer, chat_template_kwargs, template_key)
        encoder = Encoder(self.form, tokenizer, template, limit)
        made = encode(self.files, encoder, workers=workers, cache_dir=cache_dir)
        self.kept, self.digests = made.kept, made.digests
        self.tokens = Ragged.from_lengths(torch.from_numpy(made.ids), torch.from_numpy(made.lengths))
        self.dropped = len(self.files) - len(self.kept)

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def table(self) -> pa.Table:
        """All columns read, of the rows that were kept."""
        return self.files.table.take(pa.array(self.kept)) if self.dropped else self.files.table

    def where(self, row: int) -> str:
        """The name in messages of one of the rows that were kept."""
        return self.files.where(int(self.kept[row]))


def holds_ids(files: DataFiles, prompt_key: str) -> bool:
    """Whether the prompts are lists of token ids."""
    kind = files.table.schema.field(prompt_key).type
    return bool(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type))
