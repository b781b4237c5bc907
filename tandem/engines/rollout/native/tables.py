"""The block tables of all sequences, one table per group of layers, over one pool of blocks.

A sequence holds equally many table entries in each group. In a group whose layers have a window, the blocks
behind the window are given back to the pool, and the first entries no longer count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tandem.engines.rollout.draws.rows import Rows
from tandem.engines.rollout.native.blocks import BlockManager, Blocks
from tandem.memory.cache import LayerGroups, layer_groups

Index = NDArray[np.int64]
_Count = TypeVar("_Count", int, Index)
_ONE_GROUP = layer_groups([0])


class Prefix(NamedTuple):
    """Cached blocks from which a sequence can go on.

    Attributes:
        length: The number of full blocks of the prefix.
        blocks: For each group, the blocks of the prefix that are not behind the window of the next token.
    """

    length: int
    blocks: list[Blocks]


class BlockTables:
    """The block tables of the rows of a table of sequences.

    Args:
        rows: The table of sequences. Columns are added to it.
        block_size: The number of tokens per block.
        longest: The maximum number of tokens of a sequence.

    Attributes:
        pool: The manager of the blocks' reference counts. `use_cache` creates it.
        groups: The groups of layers.
        tables: For each group, (capacity, blocks of the longest sequence) int32, the block table of each row.
        held: (capacity) The number of table entries of each row. Blocks that were given back are counted.
    """

    def __init__(self, rows: Rows, block_size: int, longest: int) -> None:
        self.block_size = block_size
        self.width = self.blocks_for(longest)
        self.held = rows.column(np.int64)
        self._rows = rows
        self._columns: list[tuple[NDArray[np.int32], Index]] = []  # of each group: tables, and entries gone
        self.use_cache(0)

    def use_cache(self, blocks: int, groups: LayerGroups = _ONE_GROUP) -> None:
        """Switch to another cache with `blocks` blocks. No sequence may have blocks when this is called."""
        self.pool, self.groups = BlockManager(blocks), groups
        for _ in range(len(self._columns), len(groups.windows)):
            table = self._rows.column(np.int32, width=(self.width,))
            self._columns.append((table, self._rows.column(np.int64)))
        used = self._columns[: len(groups.windows)]
        self.tables, self._gone = [table for table, _ in used], [gone for _, gone in used]
        for table in self.tables:
            table[:] = 0  # entries without meaning must be valid blocks of this cache

    def blocks_for(self, tokens: _Count) -> _Count:
        return -(-tokens // self.block_size)

    @property
    def in_use(self) -> int:
        """Return how many blocks are in use by sequences."""
        return self.pool.blocks - self.pool.free

    @property
    def free_entries(self) -> int:
        """Return by how many entries all tables together can grow."""
        return self.pool.free // len(self.tables)

    def of(self, row: int) -> list[Blocks]:
        """Return the blocks that a row holds in each group."""
        parts = zip(self.tables, self._gone, strict=True)
        return [table[row, gone[row] : self.held[row]] for table, gone in parts]

    def slots(self, row: int, tokens: int) -> Index:
        """Return the cache slots of a row's first tokens, in the group of layers that keeps all tokens."""
        block, offset = np.divmod(np.arange(tokens), self.block_size)
        blocks: Index = self.tables[self.groups.windows.index(0)][row, block].astype(np.int64)
        return blocks * self.block_size + offset

    def clear(self, rows: Index | slice) -> None:
        """Set that these rows, new ones or all of them, hold no blocks. Nothing is given back."""
        for column in (self.held, *self._gone):
            column[rows] = 0

    def append(self, rows: Index) -> None:
        """Add a block to each of these rows, in every group. There must be enough free blocks."""
        for table in self.tables:
            table[rows, self.held[rows]] = self.pool.allocate(len(rows))
        self.held[rows] += 1

    def extend(self, row: int, tokens: int) -> None:
        """Give a row blocks for its first `tokens` tokens. There must be enough free blocks."""
        held, wanted = int(self.held[row]), self.blocks_for(tokens)
        if wanted > held:
            for table in self.tables:
                table[row, held:wanted] = self.pool.allocate(wanted - held)
            self.held[row] = wanted

    def reach(self, row: int) -> int:
        """Return the number of the row's first tokens for which it has blocks or could get free blocks."""
        return (int(self.held[row]) + self.free_entries) * self.block_size

    def share(self, row: int, prefix: Prefix) -> None:
        """Let a row without blocks begin with the blocks of a prefix."""
        self.held[row] = prefix.length
        for blocks, table, gone in zip(prefix.blocks, self.tables, self._gone, strict=True):
            self.pool.share(blocks)
            gone[row] = prefix.length - len(blocks)
            table[row, gone[row] : prefix.length] = blocks

    def fork(self, row: int, leader: int, tokens: int) -> list[tuple[int, int]]:
        """Let a row share the blocks of the first `tokens` tokens of another row, which has these tokens.

        Returns:
            The pairs (source, target) of blocks to copy, because they are not full.
        """
        full, rest = divmod(tokens, self.block_size)
        parts = zip(self.tables, self._gone, strict=True)
        self.share(row, Prefix(full, [table[leader, gone[leader] : full] for table, gone in parts]))
        if not rest:
            return []
        self.extend(row, tokens)
        return [(int(table[leader, full]), int(table[row, full])) for table in self.tables]

    def release(self, row: int) -> None:
        """Give back all blocks of a row."""
        for blocks, gone in zip(self.of(row), self._gone, strict=True):
            self.pool.release(blocks)
            gone[row] = 0
        self.held[row] = 0

    def release_behind(self, positions: Index) -> None:
        """Give back the blocks that are behind the windows.

        Args:
            positions: (count) For each row, the position of the next token that will be computed.
        """
        for window, table, gone in zip(self.groups.windows, self.tables, self._gone, strict=True):
            if not window:
                continue
            first = self._first(positions, window)
            for row in np.flatnonzero(first > gone[: len(first)]).tolist():
                self.pool.release(table[row, gone[row] : first[row]])
                gone[row] = first[row]

    def restart(self) -> None:
        """Take all blocks from all rows, and forget what is in them."""
        self.pool = BlockManager(self.pool.blocks)
        self.clear(slice(None))

    def remember(self, row: int, digests: Sequence[bytes]) -> None:
        """Record the digests of the row's first blocks, which are full, for `find`."""
        for group, (table, gone) in enumerate(zip(self.tables, self._gone, strict=True)):
            known = range(min(int(gone[row]), len(digests)), len(digests))
            self.pool.remember(table[row, known.start : known.stop], [_in(group, digests[i]) for i in known])

    def find(self, digests: Sequence[bytes]) -> Prefix:
        """Return the longest prefix of which all blocks that the next token needs are recorded.

        The blocks may be unused, so call `share` before other blocks are taken from the pool.
        """
        places = np.arange(len(digests))
        usable, ends, found = np.ones(len(digests) + 1, dtype=bool), np.arange(len(digests) + 1), []
        for group, window in enumerate(self.groups.windows):
            blocks = self.pool.find([_in(group, digest) for digest in digests])
            lost = np.maximum.accumulate(np.append(-1, np.where(blocks < 0, places, -1)))  # before each end
            usable &= lost < self._first(ends * self.block_size, window)
            found.append(blocks)
        length = int(np.flatnonzero(usable)[-1])
        first = [int(self._first(np.array(length * self.block_size), w)) for w in self.groups.windows]
        return Prefix(length, [blocks[at:length] for blocks, at in zip(found, first, strict=True)])

    def _first(self, positions: Index, window: int) -> Index:
        """Return the first table entry that a token at each position needs."""
        if not window:
            return np.zeros_like(positions)
        first: Index = np.maximum(positions - window + 1, 0) // self.block_size
        return first

    def check(self) -> None:
        """Assert that the tables and the pool agree, and that no block is lost."""
        self.pool.check([blocks for row in range(self._rows.count) for blocks in self.of(row)])


def _in(group: int, digest: bytes) -> bytes:
    """Return the digest of a block of one group."""
    return digest + bytes([group]) if group else digest
