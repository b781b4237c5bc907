"""Weight sync: buckets that carry weights from training to generation, and digests that verify them.

The trainer computes a digest from its shards. The receiver computes a digest from the weights in its engine.
The two digests are compared after every transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tandem.errors import EngineError
from tandem.models.weight_files import stored_tensors
from tandem.protocol.shipping import Shipped

Digest = dict[str, int]
"""A dict from Hugging Face name to the `checksum` of the whole tensor, a signed 64-bit number."""

Key = TypeVar("Key")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 3


class WeightSyncError(EngineError):
    """The error when an engine's weights differ from the weights that the trainer sent."""


def checksum(
    tensor: Tensor, first_row: int = 0, *, first_column: int = 0, columns: int | None = None
) -> Tensor:
    """Return a checksum of a tensor's bits: Σ_r (2r + 1) Σ_c words[r, c] modulo 2^64.

    A row consists of the elements along the last dimension. Each row is split into words of 8 bytes. If the
    row's size is not a multiple of 8 bytes, each element is one word. In a one-dimensional tensor, each
    element is a row.

    So the checksum of a tensor is the sum of the checksums of its shards, along the first or the last
    dimension. Each shard must be passed with the number of its first row. The unfused parts of fused tensors
    are compared separately. The checksum detects every change of a single word, and every exchange of two
    rows with different sums. It does not detect an exchange of words within a row.

    Args:
        tensor: The whole tensor, or a shard of consecutive rows and consecutive columns.
        first_row: The index of the shard's first row in the whole tensor.
        first_column: The index of the shard's first column in the whole tensor.
        columns: The number of columns of the whole tensor. None means as many as `tensor` has.

    Returns:
        A scalar int64 tensor on the device of `tensor`.
    """
    flat = tensor.detach().contiguous()
    rows_RC = flat.reshape(-1, flat.shape[-1]) if flat.dim() > 1 else flat.reshape(-1, 1)
    width = flat.element_size()
    wide = (columns or rows_RC.shape[1]) * width % 8 == 0
    if wide and (first_column * width % 8 or rows_RC.shape[1] * width % 8):
        # The shard begins or ends inside a word. So each element is shifted to its position in its word of 8
        # bytes.
        bits = 8 * width
        elements = rows_RC.view(_BITS[width]).long() & (2**bits - 1)
        columns_C = torch.arange(first_column, first_column + rows_RC.shape[1], device=flat.device)
        words = elements << (columns_C * bits % 64)
    else:
        if wide and rows_RC.storage_offset() * width % 8:
            rows_RC = rows_RC.clone()
        # Sums of 64-bit integers run at memory speed. Sums of narrower integers are many times slower.
        words = rows_RC.view(torch.int64) if wide else rows_RC.view(_BITS[width]).long()
    numbers = torch.arange(first_row, first_row + len(words), device=flat.device)
    total: Tensor = (words.sum(1) * (2 * numbers + 1)).sum()
    return total


def digest(tensors: Iterable[tuple[str, Tensor]]) -> Digest:
    """Return a dict from name to checksum of whole tensors, with one transfer from the device for all."""
    sums = {name: checksum(tensor) for name, tensor in tensors}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def module_digest(module: nn.Module) -> Digest:
    """Return the digest of the weights of a transformers model.

    Persistent buffers are weights too. They are converted to the dtype of the parameters, as in the trainer's
    digest.
    """
    dtype = next(module.parameters()).dtype
    return digest((name, value.to(dtype)) for name, value in stored_tensors(module).items())


@dataclass(frozen=True, slots=True)
class Sent:
    """The version and digest of the weights that a trainer has sent.

    Attributes:
        version: The trainer's version of the weights.
        digest: The digest of the weights in the dtype of the transfer.
    """

    version: int
    digest: Digest


def check_arrival(sent: Sent, held: Digest, *, engine: str, before: Sent | None = None) -> None:
    """Check that an engine's weights equal the weights that were sent to the engine.

    Args:
        sent: The version and digest of the sent weights.
        held: The digest of the engine's weights.
        engine: The engine's name, for the message.
        before: The version and digest of the previous transfer.

    Raises:
        WeightSyncError: The weights differ. The message names the weights that are missing, stale, exchanged,
            damaged, or were never sent.
    """
    remedy = "nothing was sampled from these weights; resume from the last checkpoint. If the error returns, "
    remedy += "set actor_rollout_ref.rollout.name=native, which samples from the trainer's own weights"
    _check(sent, held, f"rollout engine {engine}", before, remedy)


def check_copy(sent: Sent, held: Digest, *, holder: str) -> None:
    """Check that another model's weights equal the trainer's weights that were copied into it.

    Args:
        sent: The version and digest of the sent weights.
        held: The digest of the model's weights, in the dtype of the transfer.
        holder: The model's name, for the message.

    Raises:
        WeightSyncError: The weights differ. The message names the weights.
    """
    _check(sent, held, holder, None, "resume from the last checkpoint")


def _check(sent: Sent, held: Digest, holder: str, before: Sent | None, remedy: str) -> None:
    wrong = [name for name in {**sent.digest, **held} if held.get(name) != sent.digest.get(name)]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WeightSyncError(
            f"{len(wrong)} of {len(sent.digest)} weights of version {sent.version} in the {holder} differ "
            "from the trainer's weights",
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
    return f"{name} {_hex(found)}" + (f" is the weight {twin}" if twin else " is damaged")


def _hex(value: int | None) -> str:
    return "nothing" if value is None else f"{value % 2**64:016x}"


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """A bucket with some of a policy's weights, for the transfer between processes.

    Attributes:
        number: The number of this bucket, counted from 0.
        count: The number of buckets.
        version: The actor's version of the weights.
        tensors: A dict from Hugging Face name to whole tensor, on the host.
        sent: The version and digest of all buckets together. None except in the last bucket.
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
    """The layout of weights in buckets, one weight after the other.

    All transports of weights use this layout.

    Args:
        limit: The maximum bytes of a bucket. A larger weight gets a separate bucket of the weight's size.
        alignment: The alignment in bytes. Each weight starts at a multiple of this number.
    """

    def __init__(self, limit: int, *, alignment: int = 1) -> None:
        self._limit = limit
        self._alignment = alignment
        self._end = limit + 1  # "full", so that the first weight starts a new bucket

    def place(self, size: int) -> tuple[bool, int]:
        """Assign the next weight to a bucket.

        Args:
            size: The number of bytes of the weight.

        Returns:
            Whether a new bucket starts with this weight, and the weight's offset in the bucket, in bytes.
        """
        start = -(-self._end // self._alignment) * self._alignment
        begins = start + size > self._limit
        start = 0 if begins else start
        self._end = start + size
        return begins, start


def buckets(sizes: Mapping[Key, int], limit: int) -> list[tuple[Key, ...]]:
    """Group names into buckets, in their order (see `Packing`).

    Args:
        sizes: A dict from name to size, in bytes or another unit.
        limit: The maximum total size of a bucket, in the unit of `sizes`.
    """
    packing, packed = Packing(limit), list[list[Key]]()
    for name, size in sizes.items():
        if packing.place(size)[0]:
            packed.append([])
        packed[-1].append(name)
    return [tuple(names) for names in packed]


class Arrival:
    """A check that the buckets of one transfer arrive in order, each once, all with the same version."""

    def __init__(self) -> None:
        self._next = (0, 0)  # number and version of the expected bucket

    def expect(self, bucket: WeightBucket) -> None:
        """Check that this bucket is the next expected bucket.

        Args:
            bucket: The bucket that has arrived.

        Raises:
            WeightSyncError: A bucket is missing, arrived twice, or has another version.
        """
        number, version = self._next
        if bucket.number != number or (number > 0 and bucket.version != version):
            raise WeightSyncError(
                "a bucket of weights arrived out of order",
                got=f"bucket {bucket.number} of {bucket.count}, version {bucket.version}",
                expected=f"bucket {number}" + (f", version {version}" if number else ""),
                remedy="send all buckets of one version in order, from 0",
            )
        self._next = (0, 0) if bucket.sent is not None else (number + 1, bucket.version)
