"""The cache of an engine, from one phase of generation to the next."""

from __future__ import annotations

from collections.abc import Collection

from tandem.engines.rollout.native.attention import Attention, AttentionName, make_attention
from tandem.engines.rollout.native.budget import Wanted, statement
from tandem.engines.rollout.native.memory import CacheRoom, grown
from tandem.engines.rollout.native.paged import PagedCache, bytes_per_token
from tandem.engines.rollout.native.runner import Runner


class Store:
    """The cache and its attention: as large as the requests can fill and memory allows.

    Args:
        room: the memory it may take.
        block_size: tokens per block.
        name: of the attention.
        lasting: whether its memory should lie where it lay when it is taken again.

    Attributes:
        cache, attention: None before the first use, and once they are dropped.
        blocks: that can be used now; 0 while there is no cache, or its memory is given back.
    """

    def __init__(self, room: CacheRoom, block_size: int, name: AttentionName, *, lasting: bool) -> None:
        self.room = room
        self.cache: PagedCache | None = None
        self.attention: Attention | None = None
        self.blocks = 0
        self._block_size = block_size
        self._name: AttentionName = name
        self._lasting = lasting

    def per_block(self, runner: Runner) -> int:
        """Bytes of a block."""
        return self._block_size * bytes_per_token(runner.layers, runner.dtype)

    def is_of(self, runner: Runner) -> bool:
        """Whether there is no cache, or one of the runner's layers."""
        return self.cache is None or (self.cache.layers, self.cache.dtype) == (runner.layers, runner.dtype)

    def wanted(self, runner: Runner, pending: Collection[int], capacity: int) -> tuple[int, bool]:
        """The blocks there should be, at least those there are, and whether memory allows it as things are.
        While a cache grows memory holds both; where there is no room for that, one that holds the longest
        sequence stays as it is.

        Args:
            pending, capacity: see `CacheRoom.wanted`.

        Raises:
            EngineError: not even one sequence fits.
        """
        per_block = self.per_block(runner)
        blocks = self.room.wanted(pending, capacity, self.blocks, per_block)
        if blocks > self.blocks > 0 and not self.room.is_free(blocks * per_block):
            if max(pending) <= self.blocks:
                return self.blocks, True
            return blocks, False
        return max(blocks, self.blocks), True

    def demand(self, runner: Runner, pending: Collection[int], capacity: int) -> int:
        """The blocks that the pending requests can fill together, as far as memory allows: unlike those there
        are, no matter of what was asked for before."""
        return self.room.wanted(pending, capacity, 0, self.per_block(runner))

    def make(self, runner: Runner, blocks: int) -> None:
        """Makes a cache of so many blocks; one that is in use grows with its content. Nothing else may refer
        to the cache that was there, or its memory will not be free.

        Raises:
            EngineError: the memory is not free.
        """
        if self.cache is not None and self.blocks:
            self.cache = grown(self.cache, blocks, lasting=self._lasting)
        else:
            self.drop()
            self.room.check_free(blocks * self.per_block(runner))
            shape = (runner.layers, blocks, self._block_size, runner.dtype, runner.device)
            self.cache = PagedCache(*shape, lasting=self._lasting)
        self.attention = make_attention(self.cache, self._name)
        self.blocks = blocks

    def take(self, runner: Runner, blocks: int) -> bool:
        """Takes the memory again that was given back.

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
        cache.take()
        self.blocks = cache.blocks
        return True

    def sleep(self) -> bool:
        """Gives the memory back.

        Returns:
            Whether it will be where it was; else the cache is dropped.
        """
        stays = self.cache is not None and self.cache.stays
        if self.cache is not None and stays:
            if self.blocks:
                self.cache.give_back()
            self.blocks = 0
            self.room.forget()
        else:
            self.drop()
        return stays

    def drop(self) -> None:
        """Frees the cache."""
        self.cache = self.attention = None
        self.blocks = 0
        self.room.forget()

    def wants(self, runner: Runner, sequences: int, longest: int) -> Wanted:
        """What the cache is meant for: so many sequences of that many tokens."""
        blocks = -(-longest // self._block_size)
        return Wanted(sequences, longest, blocks, self.per_block(runner), self._block_size)

    def statement(self, wanted: Wanted) -> str:
        """See `budget.statement`."""
        most = self.room.most(wanted.block_bytes)
        memory = None if self.room.fixed else self.room.memory
        return statement(wanted, most, memory, self.room.utilization)
