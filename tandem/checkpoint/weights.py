"""The weights of a sharded checkpoint, one after the other, by one process without the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from tandem.errors import CheckpointError


class _Reader(FileSystemReader):
    """Reads the table of contents once, not for every tensor."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.contents: Metadata = super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self.contents


def read_weights(path: Path, section: str = "model.") -> Iterator[tuple[str, Tensor]]:
    """The model's weights by name, in the type they were trained in, each whole on the host.

    Args:
        path: what an engine's `save` wrote, at whatever number of ranks.
        section: what the keys of other tensors begin with, if not the model's are wanted.

    Raises:
        CheckpointError: nothing of the kind there, or it cannot be read.
    """
    try:
        reader = _Reader(path)
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise CheckpointError("no training state in this folder", got=f"{path}: {error}") from error
    for key, entry in reader.contents.state_dict_metadata.items():
        if key.startswith(section) and isinstance(entry, TensorStorageMetadata):
            value = torch.empty(entry.size, dtype=entry.properties.dtype)
            _read_into(value, key, reader, path)
            yield key.removeprefix(section), value


def _read_into(value: Tensor, key: str, reader: _Reader, path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_shards({key: value}, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
        raise CheckpointError(
            "a weight cannot be read", field=key.removeprefix("model."), got=f"{path}: {causes[0]}"
        ) from error
