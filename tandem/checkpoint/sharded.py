"""Reading sharded checkpoints without running what is in them. PyTorch reads their table of contents, and
entries that are no tensors, as pickles that may call anything. Here they may name only what it writes."""

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
"""What PyTorch's writer names in a table of contents, by module and name, besides types of numbers."""


def _member(kind: type, name: str) -> Any:
    """Return a member of an enumeration, which some versions of Python pickle as a call of `getattr`."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it names an attribute of {kind}, which is not read")
    return _MEM_FORMAT_ENCODING[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module.startswith("pathlib") and (module, name) in _CLASSES:
            return pathlib.PurePosixPath  # only kept
        known = (module, name) in _CLASSES
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not read")


class ShardReader(FileSystemReader):
    """Reads a sharded checkpoint, its table of contents once.

    Args:
        path: what an engine's `save` wrote.

    Raises:
        CheckpointError: no table of contents is there, or it cannot be read, or holds anything else.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.contents = _contents(path / _CONTENTS)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.contents


class _Planner(DefaultLoadPlanner):
    """PyTorch's own, but for entries that are no tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        plain = io.BytesIO()
        torch.save(load_plain(value, refused=CheckpointError, field=name), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_shards(state: dict[str, Any], path: Path | ShardReader, *, alone: bool = False) -> None:
    """Read into the tensors of `state` what a sharded checkpoint holds under their names. Collective, unless
    one process reads alone.

    Raises:
        CheckpointError: the table of contents cannot be read, or holds anything else than PyTorch's writer
            puts there.
        Exception: what reading met with; see `cause`.
    """
    reader = path if isinstance(path, ShardReader) else ShardReader(path)
    planner: LoadPlanner = _Planner()
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, storage_reader=reader, planner=planner, no_dist=alone)


def cause(error: BaseException) -> str:
    """What a read that failed met with, on the first rank where it did."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return why(next((failed for failed, _ in failures.values()), error))


def _contents(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            found = _Unpickler(stream).load()
        _check(found)
    except FileNotFoundError as error:
        raise CheckpointError("no training state in this folder", got=file.parent) from error
    except Exception as error:  # a strange file can make the reader raise anything
        raise CheckpointError(
            "is no table of contents of a sharded checkpoint, and was not read",
            field=str(file),
            got=str(error) or type(error).__name__,
            expected="what PyTorch's writer puts there; code in such a file is never run",
            remedy="take another checkpoint, one that the run itself wrote",
        ) from error
    assert isinstance(found, Metadata)
    return found


def _check(found: Any) -> None:
    """Refuse what is no table of contents, or names files outside of its folder."""
    if not isinstance(found, Metadata):
        raise TypeError(f"a {type(found).__name__}")
    for entry in found.state_dict_metadata.values():
        if not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            raise TypeError(f"an entry that is a {type(entry).__name__}")
    for place in found.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"a file outside of the folder: {place.relative_path}")
