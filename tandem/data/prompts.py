"""Prompts to answer: read, checked, formatted and tokenised once, before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pa_compute
import torch
from transformers import PreTrainedTokenizerBase

from tandem.data.chat import ChatTemplate
from tandem.data.encoder import Encoder
from tandem.data.encoding import encode
from tandem.data.files import DataFiles, read_files
from tandem.data.forms import PARAMETERS, UNNAMED, PromptForm
from tandem.data.loader import Prefix, uids
from tandem.data.truncation import Limit
from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged

_SCORED = {"data_source", "reward_model", "extra_info"}


class PromptDataset:
    """The prompts of one or several data files.

    A row has a prompt, and what the reward reads: unless it says otherwise a data source, which chooses the
    reward, `reward_model` with its `ground_truth`, and perhaps `extra_info`.

    Args:
        files: paths of data files.
        tokenizer: a Hugging Face tokenizer.
        form: what stands in a row.
        optional: further columns that the reward reads where they are there; None: all others. It is given
            those that it reads, and the prompt as "prompt".
        max_prompt_length: tokens at most, the template's included.
        truncation: what happens to longer prompts: "error", or the part to cut: "left", "right", "middle".
        filter_overlong_prompts: drop longer prompts instead.
        max_samples: use the first so many rows; -1 uses all.
        chat_template_kwargs: further variables of the chat template.
        template_key: the config key of the chat template, for messages.
        workers, cache_dir: see `tandem.data.encoding.encode` and `read_files`.

    Attributes:
        tokens: Ragged int32, one row per prompt.
        digests: (N) uint64, of each prompt as the files hold it.
        longest: tokens of the longest prompt.
        dropped: how many prompts were left out for their length.

    Raises:
        DataError: anything wrong with the files or their rows; says which file, which rows, and what.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        form: PromptForm = PromptForm(),  # noqa: B008 (frozen)
        optional: Sequence[str] | None = ("extra_info",),
        max_prompt_length: int = 512,
        truncation: str = "error",
        filter_overlong_prompts: bool = False,
        max_samples: int = -1,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        template_key: str = "actor_rollout_ref.model.custom_chat_template",
        workers: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        limit = Limit(max_prompt_length, "data.max_prompt_length", truncation, filter_overlong_prompts)
        self._files = read_files(
            files,
            form.required,
            optional=None if optional is None else (*optional, *form.media_keys, form.reward_fn_key),
            max_samples=max_samples,
            keys=_column_keys(form),
            cache_dir=cache_dir,
        )
        self._form = replace(form, as_ids=holds_ids(self._files, form.prompt_key))
        template = ChatTemplate(tokenizer, chat_template_kwargs, template_key)
        encoder = Encoder(self._form, tokenizer, template, limit)
        made = encode(self._files, encoder, workers=workers, cache_dir=cache_dir)
        self._kept, self.digests, self.longest = made.kept, made.digests, int(made.lengths.max())
        self.tokens = Ragged.from_lengths(torch.from_numpy(made.ids), torch.from_numpy(made.lengths))
        self.dropped = len(self._files) - len(self._kept)
        self._by_name = by_name(form, optional)

    @property
    def table(self) -> pa.Table:
        """All columns read, of the rows that were kept."""
        return self._files.table.take(pa.array(self._kept)) if self.dropped else self._files.table

    def where(self, row: int) -> str:
        """The name in messages of one of the rows that were kept."""
        return self._files.where(int(self._kept[row]))

    @cached_property
    def data_sources(self) -> tuple[str, ...]:
        """The different ones, sorted."""
        return tuple(sorted(self._sources.value_counts().field("values").to_pylist()))

    @cached_property
    def _sources(self) -> pa.ChunkedArray:
        """The data source of every row in the files."""
        key, table = self._form.reward_fn_key, self._files.table
        if key in table.column_names:
            return pa_compute.fill_null(table[key].cast(pa.string()), UNNAMED)
        return pa.chunked_array([pa.repeat(UNNAMED, len(table))])

    def places_of_sources(self, names: Sequence[str]) -> np.ndarray:
        """(N) int64: the data source of each prompt, by its place among these names.

        Raises:
            DataError: prompts of another source.
        """
        places = pa_compute.index_in(self._sources, pa.array(names, pa.string())).fill_null(-1)
        found: np.ndarray = places.to_numpy()[self._kept]
        if (found < 0).any():
            others = sorted(set(self.data_sources) - set(names))
            raise DataError(
                "the training data have sources without a weight",
                field="data.mixture",
                got=", ".join(others),
                expected=f"a weight for each of {', '.join(self.data_sources)}",
                remedy="give them one, or leave their rows out of the files",
            )
        return found.astype(np.int64)

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, rows: Sequence[int], *, uid_prefix: Prefix) -> DataProto:
        """A table of the named prompts.

        Args:
            rows: numbers below `len(self)`.
            uid_prefix: the epoch, or a number for each, or "val"; a prompt's uid is "{uid_prefix}-{index}".

        Returns:
            batch["prompts"] Ragged int64; non-tensor uid, data_source, ground_truth, messages (one without
            a role for a text, none for token ids), extra_info, index (the row's number in all files), and
            columns, those of the row by name, where the reward reads them so.
        """
        index = self._kept[np.asarray(rows, dtype=np.int64)].tolist()
        return self._table_of(self._files.take(index), self.tokens[list(rows)], uid_prefix, index)

    def _table_of(
        self, records: Sequence[dict[str, Any]], tokens: Ragged, uid_prefix: Prefix, index: Sequence[int]
    ) -> DataProto:
        form = self._form
        table: dict[str, Any] = {
            "uid": uids(uid_prefix, index),
            "data_source": list(map(form.source, records)),
            "ground_truth": list(map(form.truth, records)),
            "messages": list(map(form.messages, records)),
            "extra_info": [record.get("extra_info") or {} for record in records],
            "index": index,
        }
        if self._by_name:
            table["columns"] = [{**record, "prompt": record[form.prompt_key]} for record in records]
        return DataProto({"prompts": tokens.to(torch.int64)}, table)

    def recall(self, uids: Sequence[str]) -> DataProto:
        """The table of prompts that were in earlier ones, by their uids."""
        index = np.array([int(uid.rpartition("-")[2]) for uid in uids], dtype=np.int64)
        table = self.batch(self.rows_of(index).tolist(), uid_prefix="")
        return DataProto(table.batch, {**table.non_tensor_batch, "uid": list(uids)})

    def rows_of(self, index: np.ndarray) -> np.ndarray:
        """The rows of prompts, by their numbers in the files together."""
        rows: np.ndarray = np.searchsorted(self._kept, index)
        return rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        """See `records`."""
        return self.records([row])[0]

    def records(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The named prompts as the files hold them: the columns that were read."""
        return self._files.take(self._kept[np.asarray(rows, dtype=np.int64)])


def _column_keys(form: PromptForm) -> list[str]:
    """The config keys that name columns, for messages."""
    keys = ["data.prompt_key"]
    if form.needs is not None:
        keys += ["data.reward_fn_key", "data.answer_key"] if form.scored else [PARAMETERS]
    return keys + [f"data.{name}" for name in ("system_key", "tools_key") if getattr(form, name)]


def holds_ids(files: DataFiles, prompt_key: str) -> bool:
    """Whether the prompts are lists of token ids."""
    kind = files.table.schema.field(prompt_key).type
    return bool(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type))


def by_name(form: PromptForm, optional: Sequence[str] | None) -> bool:
    """Whether the reward reads columns by their names."""
    return not form.scored or optional is None or not {*(form.needs or ()), *optional} <= _SCORED
