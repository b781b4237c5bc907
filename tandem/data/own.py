"""A dataset class written by the user, which verl's option `data.custom_cls` names.

The class is a map-style torch dataset. It is created with `data_files`, `tokenizer`, `processor`, `config`
and, if the constructor accepts it, `max_samples`. A row is a mapping. The row has the prompt as `raw_prompt`
(messages), as `raw_prompt_ids`, or as `input_ids` with `attention_mask`. The row also has the columns that
rewards read.
"""

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
    """Create the user's dataset.

    Args:
        path: A Python file or a module.
        name: The name of the class in the file or module.
        files: The paths of the data files.
        tokenizer: A Hugging Face tokenizer.
        config: The `data` section of the config, which the class receives as OmegaConf.
        max_samples: The number of rows to use; -1: all rows.

    Raises:
        ConfigError: The file or class does not exist, the class is not a map-style dataset, or its
            constructor does not accept the arguments.
    """
    module, name = load_module(f"{path}:{name}")
    found = getattr(module, name, None)
    if not (isinstance(found, type) and hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise ConfigError(
            "there is no dataset class of this name",
            field=_FIELD,
            got=name,
            expected="a class with __len__ and __getitem__",
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
        raise ConfigError(
            "the dataset class does not accept these arguments", field=_FIELD, got=error, expected=expected
        ) from error
    return found(**given)


class OwnPrompts(PromptDataset):
    """The prompts of a dataset class written by the user.

    Every row is read once at the start, so that all problems are found. A row is read again for each batch
    that contains it, because the class may return different values each time.

    Args:
        rows: The user's dataset.
        name: The name of the dataset's class, for messages.
        encoder: The converter from rows to tokens.
        form: The form of the rows.
        by_name: Whether the reward reads columns by their names.

    Raises:
        DataError: Rows are invalid or exceed the length limit.
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
        """Return a table of the rows with the given numbers; see `PromptDataset.batch`."""
        index = self._kept[np.asarray(rows, dtype=np.int64)].tolist()
        records, part = self._read(index)
        made = gather_rows(self._names, self._encoder, [part])
        if len(made.kept) < len(index):
            raise DataError("a row of the dataset is now longer than the limit", field=self._names.names)
        tokens = Ragged.from_lengths(torch.from_numpy(made.ids), torch.from_numpy(made.lengths))
        return self._table_of(records, tokens, uid_prefix, index)

    def records(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows with the given numbers, as the user's dataset returns them."""
        return [self._row(int(row))[0] for row in self._kept[np.asarray(rows, dtype=np.int64)]]

    def _read(self, numbers: Sequence[int]) -> tuple[list[dict[str, Any]], EncodedRows]:
        """Return the rows with the given numbers, and their tokens."""
        key, found = self._form.prompt_key, list(map(self._row, numbers))
        for_tokens = [record if ids is None else {**record, key: ids} for record, ids in found]
        return [record for record, _ in found], self._encoder.part(for_tokens, numbers)

    def _row(self, number: int) -> tuple[dict[str, Any], list[int] | None]:
        """Return a row and its token ids; None for the ids if the row has no ids.

        Tensors are removed from the row, and its prompt is stored under the form's prompt key.
        """
        row = self._rows[number]
        if not isinstance(row, Mapping):
            raise DataError(
                "a row is not a mapping",
                field=f"{self._names.names} row {number}",
                got=type(row).__name__,
                expected="a row like those of verl's datasets: {raw_prompt, data_source, reward_model, …}",
            )
        ids, key = _ids(row), self._form.prompt_key
        prompt = row.get("raw_prompt", row.get(key, ids))
        plain = {name: value for name, value in row.items() if not isinstance(value, torch.Tensor)}
        whole = {**dict.fromkeys(self._form.required), **plain}
        return {**whole, key: prompt if isinstance(prompt, str | None) else list(prompt)}, ids


def _ids(row: Mapping[str, Any]) -> list[int] | None:
    """Return the prompt's token ids without padding; None if the row has no ids."""
    if (ids := row.get("raw_prompt_ids")) is not None:
        return [int(token) for token in ids]
    if (ids := row.get("input_ids")) is None:
        return None
    ids = torch.as_tensor(ids)
    mask = row.get("attention_mask")
    found: list[int] = (ids if mask is None else ids[torch.as_tensor(mask).bool()]).tolist()
    return found
