"""The checksums that an SGLang server reports for its weights (`/weights_checker`), computed here.

SGLang joins some weights of a layer, appends zeros to the vocabulary, and each of its ranks holds a part of
most weights. So a checksum covers the rank's parts of all weights that are joined. On CPUs it is the first
eight bytes of SHA-256. On GPUs it is a hash of 32-bit words
(`sglang/kernels/ops/memory/gpu_tensor_hash.py`, version 0.5.23).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The weights that SGLang joins, from the name of the joined weight to the names of its parts in order."""
EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""SGLang's names of the weights of all experts of a layer."""

Reported = Sequence[Mapping[str, str]]
"""For each rank of a server, the checksum of each weight by the server's name."""

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_KEYS = ("k_proj", "v_proj")
_VOCABULARY = ("embed_tokens", "lm_head")
_VOCABULARY_MULTIPLE = 64  # SGLang's DEFAULT_VOCAB_PADDING_SIZE
_PART_OF = {part: (joined, at) for joined, parts in JOINED.items() for at, part in enumerate(parts)}

_MASK = 0xFFFFFFFF
_TILE = 8192
_TILES_AT_A_TIME = 128
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK)
_POSITIONS = ((0x27D4EB2D, 15), (0x165667B1, 13))


class ExpectedChecksums:
    """The checksums that each rank of a server must report after an update.

    Args:
        config: The config of the language model.
        ranks: The number of ranks that split the layers.
        on_gpus: Whether the server's weights are on GPUs.
        dtype: The dtype of the server's weights.

    Attributes:
        of_ranks: For each rank, the checksum of each weight, by the server's name.
    """

    def __init__(self, config: Any, *, ranks: int, on_gpus: bool, dtype: torch.dtype) -> None:
        self._keys: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._ranks, self._dtype = ranks, dtype
        self._hash: Callable[[Tensor], str] = word_hash if on_gpus else byte_hash
        self._waiting: dict[str, dict[int, Tensor]] = {}
        self.of_ranks: list[dict[str, str]] = [{} for _ in range(ranks)]

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole tensor. A part of a joined weight is copied until the other parts have come.

        Args:
            name: The Hugging Face name.
            tensor: The tensor. It is read before this returns.
        """
        path, _, leaf = name.rpartition(".")
        parent, _, own = path.rpartition(".")
        held = tensor.detach().to(self._dtype)
        if own == "experts" and leaf in EXPERTS:
            self._close(f"{path}.{EXPERTS[leaf]}", {leaf: held}, bias=False)
            return
        if own not in _PART_OF:
            self._close(name, {own: held}, bias=leaf == "bias")
            return
        joined, _ = _PART_OF[own]
        fused = f"{parent}.{joined}.{leaf}"
        parts = self._waiting.setdefault(fused, {})
        parts[_PART_OF[own][1]] = held.clone()
        if len(parts) == len(JOINED[joined]):
            ordered = {part: parts[at] for at, part in enumerate(JOINED[joined])}
            self._close(fused, ordered, bias=leaf == "bias")
            del self._waiting[fused]

    def _close(self, name: str, parts: Mapping[str, Tensor], *, bias: bool) -> None:
        for rank, checksums in enumerate(self.of_ranks):
            shares = [self._share(part, tensor, rank, bias) for part, tensor in parts.items()]
            checksums[name] = self._hash(torch.cat(shares) if len(shares) > 1 else shares[0])

    def _share(self, part: str, tensor: Tensor, rank: int, bias: bool) -> Tensor:
        if part in _VOCABULARY:
            tensor = self._padded(tensor)
        if self._ranks == 1:
            return tensor
        if part == "gate_up_proj":
            return torch.cat([half.chunk(self._ranks, 1)[rank] for half in tensor.chunk(2, 1)], 1)
        if part == "down_proj" and tensor.dim() > 2:
            return tensor.chunk(self._ranks, 2)[rank]
        if part in _KEYS and self._keys < self._ranks:
            return tensor.chunk(self._keys)[rank // (self._ranks // self._keys)]
        if part in _BY_ROWS:
            return tensor.chunk(self._ranks)[rank]
        if part in _BY_COLUMNS and not bias:  # each rank has the whole bias
            return tensor.chunk(self._ranks, 1)[rank]
        return tensor

    def _padded(self, tensor: Tensor) -> Tensor:
        multiple = _VOCABULARY_MULTIPLE
        if -(-len(tensor) // multiple) * multiple % self._ranks:
            multiple *= self._ranks
        more = -len(tensor) % multiple
        return torch.cat((tensor, tensor.new_zeros(more, *tensor.shape[1:]))) if more else tensor

    def differences(self, reported: Reported) -> Iterator[tuple[int, str, str, str | None]]:
        """Yield (rank, name, the server's checksum, the expected one) of weights that differ.

        A weight that was never sent has no expected checksum. Weights that the server does not report cannot
        be compared; `unreported` names them.
        """
        for rank, (theirs, ours) in enumerate(zip(reported, self.of_ranks, strict=True)):
            for name, found in theirs.items():
                if ours.get(name) != found:
                    yield rank, name, found, ours.get(name)

    def unreported(self, reported: Reported) -> list[str]:
        """Return the weights that were sent, but are not among the server's weights under their name."""
        known = {name for theirs in reported for name in theirs}
        return [name for name in (*self.of_ranks[0], *self._waiting) if name not in known]


def byte_hash(tensor: Tensor) -> str:
    """Return the checksum of a tensor on a CPU server, as 16 hexadecimal digits."""
    content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content).digest()[:8].hex()


def word_hash(tensor: Tensor) -> str:
    """Return the checksum of a tensor on a GPU server, as 16 hexadecimal digits.

    It is computed on the tensor's device, in pieces of 4 MiB.
    """
    words = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if words.numel() % 4:
        words = torch.cat((words, words.new_zeros(4 - words.numel() % 4)))
    words = words.view(torch.int32)
    total = words.new_zeros(2, dtype=torch.int64)
    step = _TILE * _TILES_AT_A_TIME
    for first in range(0, len(words), step):
        total += _tiles_hash(words[first : first + step], first, 4 * len(words))
    high, low = (int(value) for value in total.tolist())
    return f"{_finish((high << 32) + low) if len(words) else 0:016x}"


def _tiles_hash(words_N: Tensor, first: int, nbytes: int) -> Tensor:
    """Return the sums of both hashes over the tiles of consecutive words, (2) int64."""
    at_N = torch.arange(first, first + len(words_N), device=words_N.device) & _MASK
    values_N = words_N.long() & _MASK
    sums = []
    for seed, (factor, turn) in zip(_SEEDS, _POSITIONS, strict=True):
        turned_N = ((at_N << turn) & _MASK) | (at_N >> (32 - turn))
        mixed_N = _mix(values_N ^ (((at_N * factor + seed) & _MASK) ^ turned_N))
        tiles = torch.nn.functional.pad(mixed_N, (0, -len(mixed_N) % _TILE)).view(-1, _TILE).sum(1) & _MASK
        sums.append(_mix(tiles ^ (nbytes & _MASK)).sum())
    return torch.stack(sums)


def _mix(x: Tensor) -> Tensor:
    """Return MurmurHash3's finalizer of 32-bit words that are held in int64."""
    x = x ^ (x >> 16)
    x = _times(x, 0x85EBCA6B)
    x = x ^ (x >> 13)
    x = _times(x, 0xC2B2AE35)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """Return x * factor modulo 2^32. The products of 16-bit halves do not overflow int64."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + ((x * high) << 16)) & _MASK


def _finish(x: int) -> int:
    """Return the finalizer of SplitMix64 of a 64-bit number."""
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
