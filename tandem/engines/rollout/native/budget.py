"""What a cache is meant for, what it can have, and what to change where that is small: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.memory.cache import DeviceMemory

_OFFLOADS = "fsdp_config.optimizer_offload=true and .param_offload=true of actor, ref and critic"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The sequences that a cache is meant for.

    Attributes:
        sequences: that run at the same time.
        tokens: of the longest.
        blocks: that it fills.
        block_bytes: bytes of a block.
        block_size: tokens of a block.
    """

    sequences: int
    tokens: int
    blocks: int
    block_bytes: int
    block_size: int

    @property
    def bytes(self) -> int:
        """Of all sequences at their longest."""
        return self.sequences * self.blocks * self.block_bytes


def statement(wanted: Wanted, blocks: int, memory: DeviceMemory | None, utilization: float) -> str:
    """A sentence about the cache that an engine can have.

    Args:
        blocks: that it can have at most.
        memory: of the device; None where the number of blocks is fixed by hand.
        utilization: the share in force.
    """
    most = min(blocks, wanted.sequences * wanted.blocks)
    at_once = most // wanted.blocks
    told = (
        f"cache: {most * wanted.block_size:,} tokens ({gib(most * wanted.block_bytes)}), "
        f"{at_once:,} sequences of {wanted.tokens:,} at a time"
    )
    if at_once >= wanted.sequences:
        return f"{told}, as many as max_num_seqs"
    told += f", {wanted.sequences:,} wanted"
    remedy = "raise num_gpu_blocks_override" if memory is None else _remedy(wanted, memory, utilization)
    return f"{told}; {remedy}"


def _remedy(wanted: Wanted, memory: DeviceMemory, utilization: float) -> str:
    needed = memory.utilization_for(wanted.bytes)
    lacking = wanted.bytes - memory.beside
    if lacking <= 0:
        return f"raise gpu_memory_utilization to {needed}"
    others = memory.held - memory.weights
    if lacking > others or needed > 1:
        most = max(0, memory.total - memory.weights - memory.reserved) // (wanted.blocks * wanted.block_bytes)
        return (
            f"this device can hold {most:,} at most: lower max_num_seqs or the lengths, or spread the model "
            "over more devices"
        )
    told = f"free {gib(lacking)} of the {gib(others)} that this process holds besides ({_OFFLOADS})"
    return f"{told}, and raise gpu_memory_utilization to {needed}" if needed > utilization else told


def gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"


def weights_statement(size: int, *, copies: bool) -> str:
    """A sentence about the weights that an engine samples from, `size` bytes."""
    if copies:
        return f"rollout weights: packed copies, {gib(size)}, filled anew in place at each update"
    return (
        f"rollout weights: as they lie in the model, unpacked; copies, {gib(size)}, would not leave the "
        "cache what max_num_seqs sequences need"
    )
