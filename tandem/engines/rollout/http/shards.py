"""Functions to write weight files that servers can load: safetensors shards with Hugging Face names."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from safetensors import safe_open
from torch import Tensor

from tandem.checkpoint.shards import ShardWriter
from tandem.engines.weight_sync import Digest, digest
from tandem.errors import EngineError

SHARD_BYTES = 4 << 30
_WRITING_S = 1800.0


@dataclass(slots=True)
class _Version:
    path: Path
    written: Future[Digest] = field(default_factory=Future)
    readers: int = 0

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        try:
            self.path.mkdir(parents=True)
            self.written.set_result(write_shards(tensors, self.path))
        except BaseException as error:
            self.written.set_exception(error)
            raise


class WeightsFolder:
    """A folder that passes weights to all servers of this process. The files are written only once.

    Args:
        path: The folder, which is created when it is needed. Files of processes that no longer exist are
            removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = f"{socket.gethostname()}_{os.getpid()}"
        self._lock = threading.Lock()
        self._versions: dict[int, _Version] = {}
        for folder in path.glob(f"version_*_{socket.gethostname()}_*"):
            number = folder.name.split("_")[-2]
            if number.isdigit() and not _is_running(int(number)):
                shutil.rmtree(folder, ignore_errors=True)  # another process may remove the same folder

    @contextmanager
    def written(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[Path, Digest]]:
        """Write the files of a version, and yield their folder and their digest.

        If several threads request the same version at the same time, only the first thread writes the files.
        The other threads iterate over their tensors without writing. The files are removed when the last
        thread leaves the context.

        Args:
            tensors: The weights of the version.
            version: The version of the weights.

        Raises:
            OSError: The disk is full.
            EngineError: The writing thread took more than half an hour after the last tensor.
        """
        with self._lock:
            first = version not in self._versions
            shared = self._versions.setdefault(
                version, _Version(self._path / f"version_{version:08d}_{self._mark}_{uuid4().hex}")
            )
            shared.readers += 1
        try:
            if first:
                shared.write(tensors)
            else:
                for _ in tensors:  # threads that read one stream together wait for each other
                    pass
            try:
                written = shared.written.result(_WRITING_S)
            except TimeoutError:
                message = f"the weights were not completely written in {_WRITING_S:.0f} s"
                raise EngineError(message, got=shared.path) from None
            yield shared.path, written
        finally:
            with self._lock:
                shared.readers -= 1
                if not shared.readers:
                    del self._versions[version]
                    shutil.rmtree(shared.path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process exists, but belongs to another user
        return True
    return True


def vectors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all one-dimensional tensors in a folder's shards."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                if len(file.get_slice(name).get_shape()) == 1:
                    yield name, file.get_tensor(name)


def write_shards(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES
) -> Digest:
    """Write tensors into an empty folder. Host memory holds only one shard at a time.

    Args:
        tensors: Pairs of name and tensor. Each tensor is valid only until the next one is requested.
        folder: The empty folder.
        shard_bytes: The largest size of a shard. A larger tensor gets its own shard.

    Returns:
        The digest of the tensors.
    """
    writer = ShardWriter(folder, shard_bytes)

    def taken() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            host = tensor.detach().to("cpu", copy=True)
            writer.add(name, host)
            yield name, host

    found = digest(taken())
    writer.close()
    return found
