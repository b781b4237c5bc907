"""A user's own dataset, as verl's `data.custom_cls` names one: a map-style dataset of torch's that is made
with data_files, tokenizer, processor, config and, if it takes it, max_samples. A row is a mapping with the
prompt as `raw_prompt` (messages), `raw_prompt_ids`, or `input_ids` with `attention_mask`, and with what
rewards read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from tandem.data.encoder import EncodedRows, Encoder
from tandem.data.encoding import PART_ROWS, gather_rows
from tandem.data.files import DataFiles
from tandem.data.forms import PromptForm
from tandem.data.loader import Prefix
from tandem.data.prompts import PromptDataset
from tandem.errors import ConfigError, DataError
from tandem.loading import load_module
from tandem.protocol import DataProto, Ragged

_FIELD = "data.custom_cls.name"


def load_dataset(
    path: str,
    name: str,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: Mapping[str, Any],
    max_samples: int,
) -> Any:
    """The user's dataset.

    Args:
        path, name: a Python file or a module, and the class in it.
        config: the data section; the class gets it as OmegaConf.

    Raises:
        ConfigError: no such file or class, one that is no map-style dataset, or that cannot be made so.
    """
    module, name = load_module(f"{path}:{name}")
    found = getattr(module, name, None)
    if not (isinstance(found, type) and hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise ConfigError(
            "no dataset of that name", field=_FIELD, got=name, expected="a class with __len__ and __getitem__"
        )
    given = {"data_files": list(files), "tokenizer": tokenizer, "processor": None}
    given |= {"config": OmegaConf.create(dict(config)), "max_samples": max_samples}
    takes = inspect.signature(found).parameters
    if "max_samples" not in takes and not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        del given["max_samples"]
    try:
        inspect.signature(found).bind(**given)
    except TypeError as error:
        expected = f"{name}({', '.join(f'{each}=…' for each in given)})"
        raise ConfigError("it cannot be made so", field=_FIELD, got=error, expected=expected) from error
    return found(**given)


class OwnPrompts(PromptDataset):
    """The prompts of a user's dataset. Every row is read once at the beginning, so that what is wrong comes
    to light, and again for each batch that it is in, so that the class may make it anew.

    Args:
        rows: the dataset.
        name: of its class, for messages.
        encoder: makes tokens of the rows.
        form: what stands in a row.
        by_name: the reward reads columns by their names.

    Raises:
        DataError: rows of the wrong shape, or beyond the limit.
    """

    def __init__(self, rows: Any, name: str, encoder: Encoder, form: PromptForm, *, by_name: bool) -> None:
        if not len(rows):
            raise DataError("the dataset is empty", field=name, got="0 rows", expected="at least one row")
        self._rows, self._by_name = rows, by_name
        self._names = DataFiles(pa.table({}), (Path(name),), (0,))
        self._form = form
        self._form = replace(form, as_ids=self._row(0)[1] is not None)
        self._encoder = replace(encoder, form=self._form)
        sources: list[str] = []
        parts: list[EncodedRows] = []
        for start in range(0, len(rows), PART_ROWS):
            records, part = self._read(range(start, min(start + PART_ROWS, len(rows))))
            sources += map(self._form.source, records)
            parts.append(part)
        made = gather_rows(self._names, self._encoder, parts)
        self._kept, self.digests, self.longest = made.kept, made.digests, int(made.lengths.max())
        self._sources = pa.chunked_array([pa.array(sources, pa.string())])
        self.dropped = len(rows) - len(self._kept)

    def batch(self, rows: Sequence[int], *, uid_prefix: Prefix) -> DataProto:
        """See `PromptDataset.batch`."""
        index = self._kept[np.asarray(rows, dtype=np.int64)].tolist()
        records, part = self._read(index)
        made = gather_rows(self._names, self._encoder, [part])
        if len(made.kept) < len(index):
            raise DataError("a row that it gave before is now over the limit", field=self._names.names)
        tokens = Ragged.from_lengths(torch.from_numpy(made.ids), torch.from_numpy(made.lengths))
        return self._table_of(records, tokens, uid_prefix, index)

    def records(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The named rows as the dataset gives them."""
        return [self._row(int(row))[0] for row in self._kept[np.asarray(rows, dtype=np.int64)]]

    def _read(self, numbers: Sequence[int]) -> tuple[list[dict[str, Any]], EncodedRows]:
        """The named rows, and their tokens."""
        key, found = self._form.prompt_key, list(map(self._row, numbers))
        for_tokens = [record if ids is None else {**record, key: ids} for record, ids in found]
        return [record for record, _ in found], self._encoder.part(for_tokens, numbers)

    def _row(self, number: int) -> tuple[dict[str, Any], list[int] | None]:
        """A row without its tensors, its prompt where the form wants it; and its token ids, if it has any."""
        row = self._rows[number]
        if not isinstance(row, Mapping):
            raise DataError(
                "a row that is no mapping",
                field=f"{self._names.names} row {number}",
                got=type(row).__name__,
                expected="what verl's datasets give: {raw_prompt, data_source, reward_model, …}",
            )
        ids, key = _ids(row), self._form.prompt_key
        prompt = row.get("raw_prompt", row.get(key, ids))
        plain = {name: value for name, value in row.items() if not isinstance(value, torch.Tensor)}
        whole = {**dict.fromkeys(self._form.required), **plain}
        return {**whole, key: prompt if isinstance(prompt, str | None) else list(prompt)}, ids


def _ids(row: Mapping[str, Any]) -> list[int] | None:
    """The prompt's token ids, without padding."""
    if (ids := row.get("raw_prompt_ids")) is not None:
        return [int(token) for token in ids]
    if (ids := row.get("input_ids")) is None:
        return None
    ids = torch.as_tensor(ids)
    mask = row.get("attention_mask")
    found: list[int] = (ids if mask is None else ids[torch.as_tensor(mask).bool()]).tolist()
    return found
