"""Messages about the size of the KV cache: the needed size, the possible size, and what to change."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.memory.cache import DeviceMemory

_OFFLOADS = "fsdp_config.optimizer_offload=true and .param_offload=true of actor, ref and critic"


@dataclass(frozen=True, slots=True)
class CacheDemand:
    """The number and the size of the sequences that a KV cache must store.

    Attributes:
        sequences: The number of sequences that run at the same time.
        tokens: The number of tokens of the longest sequence.
        blocks: The number of blocks that the longest sequence fills.
        block_bytes: The bytes of a block.
    """

    sequences: int
    tokens: int
    blocks: int
    block_bytes: int

    @property
    def bytes(self) -> int:
        """Return the bytes of the KV cache if all sequences have the maximum length."""
        return self.sequences * self.blocks * self.block_bytes


def cache_message(wanted: CacheDemand, blocks: int, memory: DeviceMemory | None, utilization: float) -> str:
    """Return a sentence that tells the user how large the KV cache of an engine can be.

    Args:
        wanted: The sequences that the cache must store.
        blocks: The maximum number of blocks that the cache can have.
        memory: The device's memory. None if the number of blocks is set by the user.
        utilization: The value of gpu_memory_utilization in use.
    """
    most = min(blocks, wanted.sequences * wanted.blocks)
    at_once = most // wanted.blocks
    text = (
        f"cache: {gib(most * wanted.block_bytes)}, "
        f"enough for {at_once:,} sequences of {wanted.tokens:,} tokens at a time"
    )
    if at_once >= wanted.sequences:
        return f"{text}, which is max_num_seqs"
    text += f"; max_num_seqs is {wanted.sequences:,}"
    remedy = "raise num_gpu_blocks_override" if memory is None else _remedy(wanted, memory, utilization)
    return f"{text}; {remedy}"


def _remedy(wanted: CacheDemand, memory: DeviceMemory, utilization: float) -> str:
    needed = memory.utilization_for(wanted.bytes)
    lacking = wanted.bytes - memory.beside
    if lacking <= 0:
        return f"raise gpu_memory_utilization to {needed}"
    others = memory.held - memory.weights
    if lacking > others or needed > 1:
        most = max(0, memory.total - memory.weights - memory.reserved) // (wanted.blocks * wanted.block_bytes)
        return (
            f"this device can hold at most {most:,}: lower max_num_seqs or the lengths, or spread the model "
            "over more devices"
        )
    text = f"free {gib(lacking)} of the {gib(others)} that this process also holds (set {_OFFLOADS})"
    return f"{text} and raise gpu_memory_utilization to {needed}" if needed > utilization else text


def gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"


def weights_message(size: int, *, copies: bool) -> str:
    """Return a sentence that tells the user how much memory an engine's weights use.

    Args:
        size: The bytes of the weights.
        copies: Whether the engine has its own packed copies.
    """
    if copies:
        return f"rollout weights: packed copies, {gib(size)}, overwritten in place at each update"
    return (
        f"rollout weights: read from the model itself. Packed copies ({gib(size)}) would leave the cache "
        "too little memory for max_num_seqs sequences"
    )
