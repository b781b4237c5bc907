"""The cache of an engine across phases of generation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tandem.engines.rollout.native.attention import Attention, AttentionName, make_attention
from tandem.engines.rollout.native.budget import CacheDemand, cache_message
from tandem.engines.rollout.native.memory import CacheRoom
from tandem.engines.rollout.native.paged import PagedCache, bytes_per_token
from tandem.engines.rollout.native.runner import Runner


@dataclass(eq=False)
class Store:
    """The cache and its attention. The cache is as large as the requests need and the memory allows.

    Attributes:
        room: The memory that the cache may take.
        name: The name of the attention.
        lasting: Whether the memory should keep its addresses when it is freed and allocated again.
        sequences: The most sequences that run at the same time.
        longest: The most tokens of a sequence.
        cache, attention: None before the first use, and after they are dropped.
        blocks: The blocks that can be used now. 0 if there is no cache or its memory is freed.
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
        """Return the bytes of a block."""
        return self.room.block_size * bytes_per_token(runner.layers, runner.dtype)

    def is_of(self, runner: Runner) -> bool:
        """Return whether there is no cache, or the cache fits the runner's layers."""
        return self.cache is None or (self.cache.layers, self.cache.dtype) == (runner.layers, runner.dtype)

    def wanted(self, runner: Runner, pending: Collection[int]) -> tuple[int, bool]:
        """Return how many blocks there should be, at least as many as now, and whether they fit.

        While a cache grows, memory holds the old and the new cache. If there is no memory for both, a cache
        that can hold the longest sequence stays as it is.

        Args:
            runner: The runner.
            pending: See `CacheRoom.wanted`.

        Raises:
            EngineError: Not even one sequence fits.
        """
        per_block = self.per_block(runner)
        blocks = self.room.wanted(pending, self.sequences, self.blocks, per_block)
        if blocks > self.blocks > 0 and not self.room.is_free(blocks * per_block):
            return (self.blocks, True) if max(pending) <= self.blocks else (blocks, False)
        return max(blocks, self.blocks), True

    def make(self, runner: Runner, blocks: int) -> None:
        """Create a cache of `blocks` blocks. A cache in use grows and keeps its content.

        No other object may refer to the old cache. Otherwise its memory would not be freed.

        Raises:
            EngineError: The memory is not free.
        """
        old = self.cache if self.blocks else None
        if old is None:
            self.drop()
            self.room.check_free(blocks * self.per_block(runner))
        shape = (runner.layers, blocks, self.room.block_size, runner.dtype, runner.device)
        cache = PagedCache(*shape, lasting=self.lasting)
        if old is not None:
            for new, held in zip((*cache.keys, *cache.values), (*old.keys, *old.values), strict=True):
                new[: old.blocks] = held
        self.cache, self.attention, self.blocks = cache, make_attention(cache, self.name), blocks

    def take(self, runner: Runner, blocks: int) -> bool:
        """Allocate the freed memory again.

        Returns:
            Whether there is now a cache of at least `blocks` blocks.

        Raises:
            EngineError: The memory is not free.
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
        """Free the memory.

        Returns:
            Whether the memory will keep its addresses. If not, the cache is dropped.
        """
        memory = None if self.cache is None else self.cache.memory
        if memory is None or not memory.give_back():
            self.drop()
            return False
        self.blocks = 0
        self.room.forget()
        return True

    def drop(self) -> None:
        """Free the cache."""
        self.cache = self.attention = None
        self.blocks = 0
        self.room.forget()

    def demand(self, runner: Runner) -> CacheDemand:
        """Return what the cache must hold: as many sequences as may run, at their full length."""
        size = self.room.block_size
        return CacheDemand(
            self.sequences, self.longest, -(-self.longest // size), self.per_block(runner), size
        )

    def cache_message(self, runner: Runner) -> str:
        """Return a sentence about the cache (see `budget.cache_message`)."""
        wanted = self.demand(runner)
        most = self.room.most(wanted.block_bytes)  # this call measures the memory
        memory = None if self.room.fixed else self.room.memory
        return cache_message(wanted, most, memory, self.room.utilization)
