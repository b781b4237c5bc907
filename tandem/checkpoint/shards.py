"""Write weights to a Hugging Face folder, with only one file's tensors in memory at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(eq=False, repr=False)
class ShardWriter:
    """A writer that fills a folder with safetensors files.

    Call `close` at the end: it writes the last file and, if there are several files, the index.

    Args:
        folder: the folder to write to.
        max_bytes: maximum size of the tensors in one file; a larger tensor gets a separate file.
    """

    folder: Path
    max_bytes: int

    def __post_init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._bytes = 0
        self._shard_of: dict[str, int] = {}
        self._shards = 0
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a CPU tensor under a new name; the caller must not change the tensor afterwards."""
        if self._held and self._bytes + tensor.nbytes > self.max_bytes:
            self._write()
        self._held[name] = tensor.contiguous()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes
        self._shard_of[name] = self._shards

    def close(self) -> None:
        """Write the last file and give all files their final names, which contain the number of files."""
        if self._held or not self._shards:
            self._write()
        names = [f"model-{i + 1:05d}-of-{self._shards:05d}.safetensors" for i in range(self._shards)]
        if self._shards == 1:
            names = [WEIGHTS]
        for number, name in enumerate(names):
            (self.folder / _unfinished(number)).rename(self.folder / name)
        if self._shards > 1:
            places = {name: names[self._shard_of[name]] for name in sorted(self._shard_of)}
            index = {"metadata": {"total_size": self._total}, "weight_map": places}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        save_file(self._held, self.folder / _unfinished(self._shards), metadata={"format": "pt"})
        self._held.clear()
        self._bytes = 0
        self._shards += 1


def _unfinished(number: int) -> str:
    return f"{number:05d}.unfinished"
