"""Weights of a Hugging Face folder, written as they come: of all of them one file's worth is held."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(eq=False, repr=False)
class ShardWriter:
    """Fills a folder with safetensors files; `close` ends the last one and, of several, writes the index.

    Args:
        folder: where they go.
        max_bytes: of the tensors in one file; a larger tensor has a file of its own.
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
        """A tensor on the host that nobody changes any more, under a name that is new."""
        if self._held and self._bytes + tensor.nbytes > self.max_bytes:
            self._write()
        self._held[name] = tensor.contiguous()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes
        self._shard_of[name] = self._shards

    def close(self) -> None:
        """All files under their names, which say how many there are."""
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
