"""Weights on their way from training to generation, and the digests that prove they arrived.

The trainer's digest is computed from its shards, the receiver's from the weights as its engine holds them.
They are compared after every transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tandem.errors import EngineError
from tandem.protocol.shipping import Shipped

Digest = dict[str, int]
"""Hugging Face name → `checksum` of the whole tensor, a signed 64-bit number."""

Key = TypeVar("Key")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 3


class WeightSyncError(EngineError):
    """Weights that an engine holds are not those that it was sent."""


def checksum(
    tensor: Tensor, first_row: int = 0, *, first_column: int = 0, columns: int | None = None
) -> Tensor:
    """Σ_r (2r + 1) Σ_c words[r, c] modulo 2^64, over the tensor's bits: a scalar int64 on its device.

    A row is what the last dimension spans, cut into words of 8 bytes; where that leaves a rest, each element
    is a word. In a tensor of one dimension each element is a row. So the sum of a tensor is that of its
    shards along the first dimension, each with the number of its first row, and of theirs along the last;
    fused tensors are compared part by part. Any change of a single word is found, and any exchange of two
    rows with different sums; words that change places within their row are not.

    Args:
        tensor: whole, or some consecutive rows, or some consecutive columns of these.
        first_row: the number of the tensor's first row in the whole.
        first_column: that of its first column.
        columns: how many the whole has; None: as many as the tensor.
    """
    flat = tensor.detach().contiguous()
    rows_RC = flat.reshape(-1, flat.shape[-1]) if flat.dim() > 1 else flat.reshape(-1, 1)
    width = flat.element_size()
    wide = (columns or rows_RC.shape[1]) * width % 8 == 0
    if wide and (first_column * width % 8 or rows_RC.shape[1] * width % 8):
        # Rows cut words apart: each element where it stands in its word of 8 bytes.
        bits = 8 * width
        elements = rows_RC.view(_BITS[width]).long() & (2**bits - 1)
        columns_C = torch.arange(first_column, first_column + rows_RC.shape[1], device=flat.device)
        words = elements << (columns_C * bits % 64)
    else:
        if wide and rows_RC.storage_offset() * width % 8:
            rows_RC = rows_RC.clone()
        # Sums of 64-bit integers run at the memory's speed; those of narrower ones are many times slower.
        words = rows_RC.view(torch.int64) if wide else rows_RC.view(_BITS[width]).long()
    numbers = torch.arange(first_row, first_row + len(words), device=flat.device)
    total: Tensor = (words.sum(1) * (2 * numbers + 1)).sum()
    return total


def digest(tensors: Iterable[tuple[str, Tensor]]) -> Digest:
    """Digests of whole tensors, by name; on a device, one transfer for all of them."""
    sums = {name: checksum(tensor) for name, tensor in tensors}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


@dataclass(frozen=True, slots=True)
class Sent:
    """A trainer's account of the weights it gave.

    Attributes:
        version: the trainer's.
        digest: of the weights in the type they were sent in.
    """

    version: int
    digest: Digest


def check_arrival(sent: Sent, held: Digest, *, engine: str, before: Sent | None = None) -> None:
    """Compares what an engine holds with what it was sent.

    Args:
        held: the engine's digest.
        engine: its name, for the message.
        before: what it had been sent before that.

    Raises:
        WeightSyncError: names the weights that are missing, stale, exchanged, damaged, or were never sent.
    """
    remedy = "nothing was sampled from them; start again from the last checkpoint. If it comes again, set "
    remedy += "actor_rollout_ref.rollout.name=native, which samples from the trainer's own weights"
    _check(sent, held, f"rollout engine {engine}", before, remedy)


def check_copy(sent: Sent, held: Digest, *, holder: str) -> None:
    """Compares what another model holds with the trainer's weights that it has taken over.

    Args:
        held: the model's digest, in the type they were sent in.
        holder: its name, for the message.

    Raises:
        WeightSyncError: names the weights that differ.
    """
    _check(sent, held, holder, None, "start again from the last checkpoint")


def _check(sent: Sent, held: Digest, holder: str, before: Sent | None, remedy: str) -> None:
    wrong = [name for name in {**sent.digest, **held} if held.get(name) != sent.digest.get(name)]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WeightSyncError(
            f"{len(wrong)} of {len(sent.digest)} weights of version {sent.version} in the {holder} are not "
            "what the trainer has",
            field=wrong[0],
            got="; ".join(_difference(name, sent, held, before) for name in wrong[:_SHOWN]) + more,
            expected="; ".join(f"{name} {_hex(sent.digest.get(name))}" for name in wrong[:_SHOWN]) + more,
            remedy=remedy,
        )


def _difference(name: str, sent: Sent, held: Digest, before: Sent | None) -> str:
    if name not in held:
        return f"{name} is missing"
    if name not in sent.digest:
        return f"{name} was never sent"
    found = held[name]
    if before is not None and before.digest.get(name) == found:
        return f"{name} {_hex(found)} is still that of version {before.version}"
    twin = next((other for other, value in sent.digest.items() if value == found), None)
    return f"{name} {_hex(found)}" + (f" is {twin}" if twin else " is damaged")


def _hex(value: int | None) -> str:
    return "nothing" if value is None else f"{value % 2**64:016x}"


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some of a policy's weights on their way between processes.

    Attributes:
        number, count: which bucket of how many.
        version: the actor's.
        tensors: whole tensors by Hugging Face name, on the host.
        sent: of all buckets together; None but in the last.
    """

    number: int
    count: int
    version: int
    tensors: dict[str, Tensor]
    sent: Sent | None

    def __reduce__(self) -> tuple[Any, ...]:
        shipped = {name: Shipped(tensor) for name, tensor in self.tensors.items()}  # unpickled as tensors
        return WeightBucket, (self.number, self.count, self.version, shipped, self.sent)


class Packing:
    """The places of weights in buckets, one after the other; every way on which weights travel packs by it.

    Args:
        limit: bytes of a bucket, at most; a larger weight is alone in one of its own size.
        alignment: bytes; each weight starts at a multiple of it.
    """

    def __init__(self, limit: int, *, alignment: int = 1) -> None:
        self._limit = limit
        self._alignment = alignment
        self._end = limit + 1  # full: the first weight begins a bucket

    def place(self, size: int) -> tuple[bool, int]:
        """Puts the next weight, of so many bytes, into its place.

        Returns:
            Whether a new bucket begins with it, and its first byte in its bucket.
        """
        start = -(-self._end // self._alignment) * self._alignment
        begins = start + size > self._limit
        start = 0 if begins else start
        self._end = start + size
        return begins, start


def buckets(sizes: Mapping[Key, int], limit: int) -> list[tuple[Key, ...]]:
    """Return names in their order, bucket by bucket; see `Packing`.

    Args:
        sizes: by name, in bytes or what else is counted.
        limit: of a bucket, at most.
    """
    packing, packed = Packing(limit), list[list[Key]]()
    for name, size in sizes.items():
        if packing.place(size)[0]:
            packed.append([])
        packed[-1].append(name)
    return [tuple(names) for names in packed]


class Arrival:
    """The order in which the buckets of one transfer come: each once, all of one version."""

    def __init__(self) -> None:
        self._next = (0, 0)  # number, version

    def expect(self, bucket: WeightBucket) -> None:
        """Checks a bucket against the one before it.

        Raises:
            WeightSyncError: a bucket was left out, came twice, or is of another version.
        """
        number, version = self._next
        if bucket.number != number or (number > 0 and bucket.version != version):
            raise WeightSyncError(
                "the buckets of weights do not follow each other",
                got=f"bucket {bucket.number} of {bucket.count}, version {bucket.version}",
                expected=f"bucket {number}" + (f", version {version}" if number else ""),
                remedy="send all buckets of one version in order, from 0",
            )
        self._next = (0, 0) if bucket.sent is not None else (number + 1, bucket.version)
