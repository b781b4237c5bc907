"""The dataset of prompts, which are read, checked, formatted and tokenized once, before training."""

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

    A row has a prompt and the columns that the reward reads. By default these columns are a data source,
    which selects the reward function, `reward_model` with its `ground_truth`, and optionally `extra_info`.

    Args:
        files: Paths of data files.
        tokenizer: A Hugging Face tokenizer.
        form: The form of the rows.
        optional: Additional columns that the reward reads if they exist; None: all other columns. The reward
            receives the columns that it reads, and the prompt as "prompt".
        max_prompt_length: The largest number of tokens of a prompt, including the template's tokens.
        truncation: The treatment of longer prompts: "error", or the part that is cut off: "left", "right" or
            "middle".
        filter_overlong_prompts: Whether to drop longer prompts instead.
        max_samples: Use only the first `max_samples` rows; -1: all rows.
        chat_template_kwargs: Additional variables of the chat template.
        template_key: The config key of the chat template, for messages.
        workers: The number of processes; see `tandem.data.encoding.encode`.
        cache_dir: The cache folder; see `read_files`.

    Attributes:
        tokens: Ragged int32, one row per prompt.
        digests: (N) uint64, a digest of each prompt's row in the files.
        longest: The number of tokens of the longest prompt.
        dropped: The number of prompts that were left out because of their length.

    Raises:
        DataError: Something is wrong with the files or their rows. The error names the file, the rows and the
            problem.
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
        """The table of all columns that were read, with only the rows that were not dropped."""
        return self._files.table.take(pa.array(self._kept)) if self.dropped else self._files.table

    def where(self, row: int) -> str:
        """Return the name of a row for messages."""
        return self._files.where(int(self._kept[row]))

    @cached_property
    def data_sources(self) -> tuple[str, ...]:
        """The names of all data sources, sorted."""
        return tuple(sorted(self._sources.value_counts().field("values").to_pylist()))

    @cached_property
    def _sources(self) -> pa.ChunkedArray:
        """The data source of every row in the files."""
        key, table = self._form.reward_fn_key, self._files.table
        if key in table.column_names:
            return pa_compute.fill_null(table[key].cast(pa.string()), UNNAMED)
        return pa.chunked_array([pa.repeat(UNNAMED, len(table))])

    def places_of_sources(self, names: Sequence[str]) -> np.ndarray:
        """Return (N) int64: for each prompt, the index of its data source in `names`.

        Raises:
            DataError: A prompt has a source that is not in `names`.
        """
        places = pa_compute.index_in(self._sources, pa.array(names, pa.string())).fill_null(-1)
        found: np.ndarray = places.to_numpy()[self._kept]
        if (found < 0).any():
            others = sorted(set(self.data_sources) - set(names))
            raise DataError(
                "some sources of the training data have no weight",
                field="data.mixture",
                got=", ".join(others),
                expected=f"a weight for each of {', '.join(self.data_sources)}",
                remedy="add weights for them, or remove their rows from the files",
            )
        return found.astype(np.int64)

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, rows: Sequence[int], *, uid_prefix: Prefix) -> DataProto:
        """Return a table of the prompts with the given numbers.

        Args:
            rows: Row numbers below `len(self)`.
            uid_prefix: The epoch, or one number per row, or "val". A prompt's uid is "{uid_prefix}-{index}".

        Returns:
            batch["prompts"] Ragged int64; non-tensor uid, data_source, ground_truth, messages (one message
            without a role for a text, [] for token ids), extra_info, index (the row's number in all files),
            and, if the reward reads columns by name, columns (the columns of the row).
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
        """Return the table of the prompts with the given uids, which come from earlier tables."""
        index = np.array([int(uid.rpartition("-")[2]) for uid in uids], dtype=np.int64)
        table = self.batch(self.rows_of(index).tolist(), uid_prefix="")
        return DataProto(table.batch, {**table.non_tensor_batch, "uid": list(uids)})

    def rows_of(self, index: np.ndarray) -> np.ndarray:
        """Convert row numbers in the concatenated files to row numbers in the dataset."""
        rows: np.ndarray = np.searchsorted(self._kept, index)
        return rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return one prompt; see `records`."""
        return self.records([row])[0]

    def records(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows with the given numbers as stored in the files, with the columns that were read."""
        return self._files.take(self._kept[np.asarray(rows, dtype=np.int64)])


def _column_keys(form: PromptForm) -> list[str]:
    """Return the config keys that name columns, for messages."""
    keys = ["data.prompt_key"]
    if form.needs is not None:
        keys += ["data.reward_fn_key", "data.answer_key"] if form.scored else [PARAMETERS]
    return keys + [f"data.{name}" for name in ("system_key", "tools_key") if getattr(form, name)]


def holds_ids(files: DataFiles, prompt_key: str) -> bool:
    """Return whether the prompts are lists of token ids."""
    kind = files.table.schema.field(prompt_key).type
    return bool(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type))


def by_name(form: PromptForm, optional: Sequence[str] | None) -> bool:
    """Return whether the reward reads columns by their names."""
    return not form.scored or optional is None or not {*(form.needs or ()), *optional} <= _SCORED
