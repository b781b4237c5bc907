"""The cache of an engine, from one phase of generation to the next."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tandem.engines.rollout.native.attention import Attention, AttentionName, make_attention
from tandem.engines.rollout.native.budget import Wanted, statement
from tandem.engines.rollout.native.memory import CacheRoom
from tandem.engines.rollout.native.paged import PagedCache, bytes_per_token
from tandem.engines.rollout.native.runner import Runner


@dataclass(eq=False)
class Store:
    """The cache and its attention: as large as the requests can fill and memory allows.

    Attributes:
        room: the memory it may take.
        name: of the attention.
        lasting: whether its memory should lie where it lay when it is taken again.
        sequences: that run at the same time, at most.
        longest: tokens of a sequence, at most.
        cache, attention: None before the first use, and once they are dropped.
        blocks: that can be used now; 0 while there is no cache, or its memory is given back.
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
        """Bytes of a block."""
        return self.room.block_size * bytes_per_token(runner.layers, runner.dtype)

    def is_of(self, runner: Runner) -> bool:
        """Whether there is no cache, or one of the runner's layers."""
        return self.cache is None or (self.cache.layers, self.cache.dtype) == (runner.layers, runner.dtype)

    def wanted(self, runner: Runner, pending: Collection[int]) -> tuple[int, bool]:
        """Return the blocks there should be, at least those there are, and whether memory allows it as things
        are. While a cache grows memory holds both; where there is no room for that, one that holds the
        longest sequence stays as it is.

        Args:
            pending: see `CacheRoom.wanted`.

        Raises:
            EngineError: not even one sequence fits.
        """
        per_block = self.per_block(runner)
        blocks = self.room.wanted(pending, self.sequences, self.blocks, per_block)
        if blocks > self.blocks > 0 and not self.room.is_free(blocks * per_block):
            return (self.blocks, True) if max(pending) <= self.blocks else (blocks, False)
        return max(blocks, self.blocks), True

    def make(self, runner: Runner, blocks: int) -> None:
        """Make a cache of so many blocks; one that is in use grows with its content. Nothing else may refer
        to the cache that was there, or its memory will not be free.

        Raises:
            EngineError: the memory is not free.
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
        """Take the memory again that was given back.

        Returns:
            Whether there is a cache of at least so many blocks then.

        Raises:
            EngineError: the memory is not free.
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
        """Give the memory back.

        Returns:
            Whether it will be where it was; else the cache is dropped.
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

    def meant_for(self, runner: Runner) -> Wanted:
        """Return what the cache is meant for: as many sequences as may run, at their longest."""
        size = self.room.block_size
        return Wanted(self.sequences, self.longest, -(-self.longest // size), self.per_block(runner), size)

    def statement(self, runner: Runner) -> str:
        """See `budget.statement`."""
        wanted = self.meant_for(runner)
        most = self.room.most(wanted.block_bytes)  # which measures the memory
        memory = None if self.room.fixed else self.room.memory
        return statement(wanted, most, memory, self.room.utilization)
