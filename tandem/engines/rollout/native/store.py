"""A class that keeps an engine's KV cache across phases of generation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tandem.engines.rollout.native.attention import Attention, AttentionName, make_attention
from tandem.engines.rollout.native.budget import CacheDemand, cache_message
from tandem.engines.rollout.native.memory import CacheRoom
from tandem.engines.rollout.native.paged import PagedCache, bytes_per_token, groups_of
from tandem.engines.rollout.native.runner import Runner


@dataclass(eq=False)
class Store:
    """The KV cache of an engine and its attention.

    The cache has the size that the requests need, limited by the memory.

    Attributes:
        room: The memory budget of the cache.
        name: The name of the attention implementation.
        lasting: Whether the memory should keep its addresses when it is freed and allocated again.
        sequences: The maximum number of sequences that run at the same time.
        longest: The maximum number of tokens of a sequence.
        cache: The cache. None before the first use, and after the cache is dropped.
        attention: The attention that reads and writes the cache. None if there is no cache.
        blocks: The number of blocks that can be used now. 0 if there is no cache or its memory is freed.
    """

    room: CacheRoom
    name: AttentionName
    lasting: bool
    sequences: int
    longest: int
    cache: PagedCache | None = None
    attention: Attention | None = None
    blocks: int = 0

    def per_block(self, runner: Runner) -> int:
        """Return the number of bytes of one block."""
        return self.room.block_size * bytes_per_token(runner.layers, runner.dtype, runner.record_bytes)

    def is_of(self, runner: Runner) -> bool:
        """Return whether there is no cache, or the cache fits the runner's layers."""
        cache = self.cache
        mine = (runner.layers, runner.dtype, runner.record_bytes)
        return cache is None or (cache.layers, cache.dtype, cache.record_bytes) == mine

    def wanted(self, runner: Runner, pending: Collection[int]) -> tuple[int, bool]:
        """Return how many blocks the cache should have, and whether they fit into the memory.

        The number is at least the current number of blocks. While a cache grows, the old and the new cache
        need memory at the same time. If there is too little memory for both, and the old cache can store the
        longest sequence, the number does not change.

        Args:
            runner: The runner.
            pending: See `CacheRoom.wanted`.

        Raises:
            EngineError: The memory is too small for the longest sequence.
        """
        per_block = self.per_block(runner)
        blocks = self.room.wanted(pending, self.sequences, self.blocks, per_block)
        if blocks > self.blocks > 0 and not self.room.is_free(blocks * per_block):
            return (self.blocks, True) if max(pending) <= self.blocks else (blocks, False)
        return max(blocks, self.blocks), True

    def make(self, runner: Runner, blocks: int) -> None:
        """Create a cache of `blocks` blocks. The content of a cache in use is copied to the new cache.

        No other object may refer to the old cache. Otherwise the old cache's memory would not be freed.

        Raises:
            EngineError: There is not enough free memory.
        """
        old = self.cache if self.blocks else None
        if old is None:
            self.drop()
            self.room.check_free(blocks * self.per_block(runner))
        shape = (runner.layers, blocks, self.room.block_size, runner.dtype, runner.device)
        cache = PagedCache(*shape, lasting=self.lasting, record_bytes=runner.record_bytes)
        if old is not None:
            for new, held in zip(cache.parts, old.parts, strict=True):
                new[: old.blocks] = held[: old.blocks]
        self.cache, self.attention, self.blocks = cache, make_attention(cache, self.name), blocks

    def take(self, runner: Runner, blocks: int) -> bool:
        """Allocate the memory that `sleep` freed.

        Returns:
            Whether there is now a cache of at least `blocks` blocks.

        Raises:
            EngineError: There is not enough free memory.
        """
        cache = self.cache
        if cache is None or self.blocks or not self.is_of(runner) or cache.blocks < blocks:
            return False
        if not self.room.may_be_taken_again(cache.blocks, self.per_block(runner)):
            return False
        assert cache.memory is not None
        cache.memory.take()
        self.blocks = cache.blocks
        return True

    def sleep(self) -> bool:
        """Free the memory of the cache.

        Returns:
            True if `wake` will allocate the memory at the same addresses. If false, the tensors of the cache
            are deleted.
        """
        memory = None if self.cache is None else self.cache.memory
        if memory is None or not memory.give_back():
            self.drop()
            return False
        self.blocks = 0
        self.room.forget()
        return True

    def drop(self) -> None:
        self.cache = self.attention = None
        self.blocks = 0
        self.room.forget()

    def demand(self, runner: Runner) -> CacheDemand:
        """Return the demand of the maximum number of sequences at the maximum length."""
        blocks = groups_of(runner.layers).blocks(self.longest, 1, self.room.block_size)
        return CacheDemand(self.sequences, self.longest, blocks, self.per_block(runner))

    def cache_message(self, runner: Runner) -> str:
        """Return a sentence for the user about the cache (see `budget.cache_message`)."""
        wanted = self.demand(runner)
        most = self.room.most(wanted.block_bytes)  # this call measures the memory
        memory = None if self.room.fixed else self.room.memory
        return cache_message(wanted, most, memory, self.room.utilization)
