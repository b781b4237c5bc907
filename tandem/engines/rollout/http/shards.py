"""Weights as files that a server can load: safetensors shards with Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tandem.engines.weight_sync import Digest, digest

SHARD_BYTES = 4 << 30


def write_shards(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES
) -> Digest:
    """Writes tensors into an empty folder. One shard at a time is held in host memory.

    Args:
        tensors: each only valid until the next is asked for.
        shard_bytes: a shard ends with the tensor that reaches this size.

    Returns:
        the digest of the tensors.
    """
    written: Digest = {}
    shard: dict[str, Tensor] = {}
    size = count = 0
    for name, tensor in tensors:
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += shard[name].nbytes
        if size >= shard_bytes:
            written |= _write(shard, folder, count)
            shard, size, count = {}, 0, count + 1
    if shard:
        written |= _write(shard, folder, count)
    return written


def _write(shard: dict[str, Tensor], folder: Path, index: int) -> Digest:
    save_file(shard, folder / f"model-{index:05d}.safetensors", metadata={"format": "pt"})
    return digest(shard.items())
