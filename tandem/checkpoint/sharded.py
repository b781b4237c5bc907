"""Read sharded checkpoints safely, without running code from their files.

In a sharded checkpoint of PyTorch, the metadata file and entries that are not tensors are pickles, and a
pickle may call any function. This module only unpickles the classes that PyTorch's writer uses.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from tandem.errors import CheckpointError
from tandem.unpickling import load_plain, why

_CONTENTS = ".metadata"
_PLACES = "torch.distributed.checkpoint"
_CLASSES = frozenset(
    {
        *((f"{_PLACES}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *((f"{_PLACES}.metadata", name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata")),
        *((f"{_PLACES}.metadata", name) for name in ("BytesStorageMetadata", "TensorProperties")),
        (f"{_PLACES}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{_PLACES}.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        *(
            (module, name)
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "WindowsPath")
        ),
    }
)
"""Modules and names that PyTorch's writer uses in a metadata file, in addition to dtypes."""


def _member(kind: type, name: str) -> Any:
    """Return a member of an enumeration.

    Some versions of Python pickle an enumeration member as a call of `getattr`.
    """
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it names an attribute of {kind}, which is not allowed")
    return _MEM_FORMAT_ENCODING[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module.startswith("pathlib") and (module, name) in _CLASSES:
            return pathlib.PurePosixPath  # the path is stored but never opened
        known = (module, name) in _CLASSES
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")


class ShardReader(FileSystemReader):
    """A reader of a sharded checkpoint that reads its metadata file once.

    Args:
        path: a folder that an engine's `save` wrote.

    Raises:
        CheckpointError: the metadata file is missing, cannot be read, or contains other objects.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.contents = _contents(path / _CONTENTS)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.contents


class _Planner(DefaultLoadPlanner):
    """PyTorch's load planner with safe reading of entries that are not tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        plain = io.BytesIO()
        torch.save(load_plain(value, refused=CheckpointError, field=name), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_shards(state: dict[str, Any], path: Path | ShardReader, *, alone: bool = False) -> None:
    """Load the entries of a sharded checkpoint into the tensors of `state` with the same names.

    All ranks must call this together, unless `alone` is set.

    Args:
        state: a dict from name to tensor; the tensors are overwritten.
        path: the checkpoint, or a reader of the checkpoint.
        alone: whether a single process reads without the other ranks.

    Raises:
        CheckpointError: the metadata file cannot be read, or contains objects that PyTorch does not write.
        Exception: any other read error; see `cause`.
    """
    reader = path if isinstance(path, ShardReader) else ShardReader(path)
    planner: LoadPlanner = _Planner()
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, storage_reader=reader, planner=planner, no_dist=alone)


def cause(error: BaseException) -> str:
    """Return the error text of a failed read, from the first rank that failed."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return why(next((failed for failed, _ in failures.values()), error))


def _contents(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            found = _Unpickler(stream).load()
        _check(found)
    except FileNotFoundError as error:
        raise CheckpointError("there is no training state in this folder", got=file.parent) from error
    except Exception as error:  # a damaged or malicious file can make the reader raise anything
        raise CheckpointError(
            "is not the metadata file of a sharded checkpoint, so it was not loaded",
            field=str(file),
            got=str(error) or type(error).__name__,
            expected="a metadata file from PyTorch's writer; Tandem never runs code from such a file",
            remedy="use another checkpoint that the run itself wrote",
        ) from error
    assert isinstance(found, Metadata)
    return found


def _check(found: Any) -> None:
    """Check that an object is checkpoint metadata, and names only files inside its folder."""
    if not isinstance(found, Metadata):
        raise TypeError(f"it holds an object of type {type(found).__name__}")
    for entry in found.state_dict_metadata.values():
        if not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            raise TypeError(f"it holds an entry of type {type(entry).__name__}")
    for place in found.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"it names a file outside of the folder: {place.relative_path}")
