"""Reference counts of the paged KV cache's blocks, and the lookup of blocks that store a known prefix.

A full block is identified by a digest of its tokens and of the previous block's digest. So blocks with equal
digests have equal prefixes. A block that no sequence uses can still be found until its memory is needed.
Blocks that were released first are reused first. Within a sequence, the last blocks are reused first, so that
the remaining blocks form a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

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
        self._unknown: list[int] = []  # unused blocks without a digest
        self._idle: OrderedDict[int, None] = OrderedDict()  # unused, with a digest; oldest release first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self.grow(blocks)

    def grow(self, blocks: int) -> None:
        """Add blocks until the total number is `blocks`."""
        self._holders = np.pad(self._holders, (0, blocks - self.blocks))
        self._unknown[:0] = range(blocks - 1, self.blocks - 1, -1)
        self.blocks = blocks

    @property
    def free(self) -> int:
        """Return the number of blocks that no sequence uses."""
        return len(self._unknown) + len(self._idle)

    def allocate(self, count: int) -> Blocks:
        """Return `count` free blocks and set their reference counts to 1. Their content is arbitrary.

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
        """Add one to the reference count of each block."""
        for block in blocks[self._holders[blocks] == 0].tolist():
            del self._idle[block]
        self._holders[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        """Subtract one from the reference count of each of a sequence's blocks."""
        self._holders[blocks] -= 1
        for block in blocks[self._holders[blocks] == 0][::-1].tolist():
            if block in self._digest_of:
                self._idle[block] = None
            else:
                self._unknown.append(block)

    def remember(self, blocks: Blocks, digests: Sequence[bytes]) -> None:
        """Record the digests of full blocks that a sequence uses, so that `find` finds the blocks.

        Of two blocks with the same content, only the first is recorded.
        """
        for block, digest in zip(blocks.tolist(), digests, strict=True):
            if digest not in self._block_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest

    def find(self, digests: Sequence[bytes]) -> Blocks:
        """Return the block with each digest, or -1 if the digest is not recorded.

        The blocks may be unused, so call `share` before the next `allocate`.
        """
        return np.array([self._block_of.get(digest, -1) for digest in digests], dtype=np.int32)

    def idle(self, blocks: Blocks) -> int:
        """Return how many of these blocks are unused."""
        return int((self._holders[blocks] == 0).sum())

    def forget(self) -> None:
        """Delete the digests of all blocks, so that `find` finds no block."""
        self._unknown += reversed(self._idle)
        self._idle.clear()
        self._block_of.clear()
        self._digest_of.clear()

    def check(self, tables: Sequence[Blocks]) -> None:
        """Assert that exactly the blocks in these sequences' tables are in use, and that no block is lost."""
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
    """Append to `known` the digests of those full blocks of `ids` (T) that have no digest yet.

    Args:
        root: The digest that is used as the predecessor of the first block.
        known: The digests of the first full blocks. The list is extended in place.
        ids: The tokens of a sequence.
        block_size: Tokens per block.
    """
    for block in range(len(known), len(ids) // block_size):
        parent = known[-1] if known else root
        tokens = np.ascontiguousarray(ids[block * block_size : (block + 1) * block_size], dtype=np.int64)
        known.append(blake2b(tokens.tobytes(), digest_size=16, key=parent).digest())
