"""Reference counts of the paged cache's blocks, and the lookup of blocks that hold a known prefix.

A full block is identified by a digest of its tokens, chained over the block before it, so that equal digests
mean equal prefixes. A block without holders stays known until its memory is needed. Blocks that were released
first are reused first. Of one sequence, the last blocks are reused first, so that the blocks that remain form
a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int32]


class BlockManager:
    """Reference counts and digests of the cache's blocks.

    Args:
        blocks: The number of blocks.

    Attributes:
        blocks: The number of blocks.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = 0
        self._holders = np.zeros(0, dtype=np.int32)
        self._unknown: list[int] = []  # without holders and without a digest
        self._idle: OrderedDict[int, None] = OrderedDict()  # without holders but known; oldest release first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self.grow(blocks)

    def grow(self, blocks: int) -> None:
        """Add blocks until there are `blocks` of them."""
        self._holders = np.pad(self._holders, (0, blocks - self.blocks))
        self._unknown[:0] = range(blocks - 1, self.blocks - 1, -1)
        self.blocks = blocks

    @property
    def free(self) -> int:
        """Return the number of blocks without holders."""
        return len(self._unknown) + len(self._idle)

    def allocate(self, count: int) -> Blocks:
        """Return `count` blocks with one holder each. Their content has no meaning.

        `count` must be at most `free`.
        """
        fresh = min(count, len(self._unknown))
        out = [self._unknown.pop() for _ in range(fresh)]
        for _ in range(count - fresh):
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
            out.append(block)
        self._holders[out] = 1
        return np.array(out, dtype=np.int32)

    def share(self, blocks: Blocks) -> None:
        """Add one holder to each block."""
        for block in blocks[self._holders[blocks] == 0].tolist():
            del self._idle[block]
        self._holders[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        """Remove one holder from each of a sequence's blocks."""
        self._holders[blocks] -= 1
        for block in blocks[self._holders[blocks] == 0][::-1].tolist():
            if block in self._digest_of:
                self._idle[block] = None
            else:
                self._unknown.append(block)

    def remember(self, blocks: Blocks, digests: Sequence[bytes]) -> None:
        """Record full blocks, held by their sequence, under their digests.

        Of two blocks with the same content, only the first is recorded.
        """
        for block, digest in zip(blocks.tolist(), digests, strict=True):
            if digest not in self._block_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest

    def find(self, digests: Sequence[bytes]) -> Blocks:
        """Return the blocks of the longest known prefix.

        They may have no holder, so call `share` before `allocate`.
        """
        found = takewhile(lambda block: block is not None, map(self._block_of.get, digests))
        return np.array(list(found), dtype=np.int32)

    def idle(self, blocks: Blocks) -> int:
        """Return how many of these blocks have no holder."""
        return int((self._holders[blocks] == 0).sum())

    def forget(self) -> None:
        """Forget the content of all blocks."""
        self._unknown += reversed(self._idle)
        self._idle.clear()
        self._block_of.clear()
        self._digest_of.clear()

    def check(self, tables: Sequence[Blocks]) -> None:
        """Assert that exactly the blocks of these sequences are held, and that no block is lost."""
        holders = np.zeros(self.blocks, dtype=np.int32)
        for table in tables:
            holders[table] += 1
        assert (holders == self._holders).all(), "holders do not match the tables"
        free = [*self._unknown, *self._idle]
        assert sorted(free) == np.flatnonzero(holders == 0).tolist(), "free blocks are lost or held"
        assert not set(self._unknown) & set(self._digest_of), "a block without content is known"
        assert set(self._idle) <= set(self._digest_of), "an idle block is unknown"
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of


def chain(root: bytes, known: list[bytes], ids: NDArray[np.int64], block_size: int) -> None:
    """Extend `known`, the digests of the first full blocks of `ids` (T), to all full blocks.

    Args:
        root: Stands for the block before the first block.
        known: The digests so far. New digests are appended.
        ids: The tokens.
        block_size: Tokens per block.
    """
    for block in range(len(known), len(ids) // block_size):
        parent = known[-1] if known else root
        tokens = np.ascontiguousarray(ids[block * block_size : (block + 1) * block_size], dtype=np.int64)
        known.append(blake2b(tokens.tobytes(), digest_size=16, key=parent).digest())
