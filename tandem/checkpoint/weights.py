"""The weights of a sharded checkpoint, one after the other, by one process without the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tandem.checkpoint.sharded import ShardReader, cause, load_shards
from tandem.errors import CheckpointError


def read_weights(path: Path, section: str = "model.") -> Iterator[tuple[str, Tensor]]:
    """The model's weights by name, in the type they were trained in, each whole on the host.

    Args:
        path: what an engine's `save` wrote, at whatever number of ranks.
        section: what the keys of other tensors begin with, if not the model's are wanted.

    Raises:
        CheckpointError: nothing of the kind there, or it cannot be read.
    """
    reader = ShardReader(path)
    for key, entry in reader.contents.state_dict_metadata.items():
        if key.startswith(section) and isinstance(entry, TensorStorageMetadata):
            value = torch.empty(entry.size, dtype=entry.properties.dtype)
            try:
                load_shards({key: value}, reader, alone=True)
            except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    "a weight cannot be read", field=key.removeprefix("model."), got=f"{path}: {cause(error)}"
                ) from error
            yield key.removeprefix(section), value
