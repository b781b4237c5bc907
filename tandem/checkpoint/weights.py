"""Read the weights of a sharded checkpoint, one at a time, in one process without the model."""

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
    """Yield (name, full CPU tensor) for each weight of the model, in the dtype used for training.

    Args:
        path: a folder that an engine's `save` wrote, with any number of ranks.
        section: prefix of the keys to read; the default reads the model's weights.

    Raises:
        CheckpointError: the sharded checkpoint does not exist or cannot be read.
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
