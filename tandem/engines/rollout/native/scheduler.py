"""Continuous batching: which tokens the next step computes, and in which blocks they go.

A sequence needs a token computed as long as its cache holds fewer tokens than it has. Every step gives
one token to each sequence that has just that one missing, and what is left of the token budget to
prompts, oldest first. When no block is left for a new token the youngest sequence gives up its blocks; it
keeps what it has written and is computed again, as a longer prompt, before any younger one starts. The
order of everything follows from the order of submission; no clock decides it.

Samples of one prompt share its blocks: the first computes it, the others fork when it is complete, each
with a copy of its last block if that is not full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tandem.engines.rollout.counters import Counters
from tandem.engines.rollout.draws.rows import Rows
from tandem.engines.rollout.native.blocks import BlockManager, Blocks, chain
from tandem.engines.rollout.native.plan import Index, Plan
from tandem.protocol import Request

_Count = TypeVar("_Count", int, Index)

# While others run, waiting requests are admitted when this share of the rows is free: steps that only
# decode are cheaper than those between which prompts come in one by one.
_ADMIT_SHARE = 16


@dataclass(slots=True)
class _Prompts:
    """The prompt tokens of a step, as they are put together.

    Attributes:
        budget: tokens that may still be added.
        leaders: for each prompt in computation, which of `rows` completes it in this step, None if none does.
    """

    budget: int
    rows: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    copies: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    leaders: dict[bytes, int | None] = field(default_factory=dict)


class Scheduler:
    """The order in which sequences run. It adds its columns to those of `rows`, the table of all sequences
    that were admitted.

    Args:
        rows: as many sequences as may run at the same time.
        counters: receives preemptions and tokens found in known blocks.
        max_length: tokens of a sequence, at most.
        max_num_batched_tokens: tokens of a step; sequences that decode are never held back by it.
        chunked: whether a prompt may be computed in several steps; if not, one that exceeds the budget is
            computed in a step without other prompts.
        caching: whether blocks are found again by their content.

    Attributes:
        blocks: who holds which; made by the owner of the cache.
        waiting: requests that have no row yet.
        computed: tokens of each row in the cache, or on their way there.
        length: tokens of each row, those drawn and not yet accepted included.
        tables: (capacity, blocks of the longest sequence) int32.
    """

    def __init__(
        self,
        rows: Rows,
        counters: Counters,
        *,
        max_length: int,
        block_size: int,
        max_num_batched_tokens: int,
        chunked: bool,
        caching: bool,
    ) -> None:
        self._rows = rows
        self._counters = counters
        self._block_size = block_size
        self._budget = max_num_batched_tokens
        self._chunked = chunked
        self._caching = caching
        self.blocks = BlockManager(0)
        self.waiting: deque[Request] = deque()
        self.computed = rows.column(np.int64)
        self.length = rows.column(np.int64)
        self._held = rows.column(np.int64)
        self._prompt_length = rows.column(np.int64)
        self._limit = rows.column(np.int64)
        self._arrival = rows.column(np.int64)
        self._prompt = rows.column(object, None)  # bytes, equal for equal prompts
        self._digests = rows.column(object, None)  # of full blocks; None: never to be found
        self.tables = rows.column(np.int32, width=(self.blocks_for(max_length),))
        self._arrivals = 0
        self._root = 0  # of all digests

    def blocks_for(self, tokens: _Count) -> _Count:
        return -(-tokens // self._block_size)

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return int(np.count_nonzero(self._held[: self._rows.count]))

    @property
    def held(self) -> int:
        """Blocks that sequences hold."""
        return self.blocks.blocks - self.blocks.free

    @property
    def use(self) -> float:
        """The share of all blocks that sequences hold."""
        return self.held / self.blocks.blocks if self.blocks.blocks else 0.0

    def check(self) -> None:
        """Asserts that the sequences' tables and the block manager agree and that no block is lost."""
        self.blocks.check([self._table(row) for row in range(self._rows.count)])

    def _table(self, row: int) -> Blocks:
        table: Blocks = self.tables[row, : self._held[row]]
        return table

    def use_cache(self, blocks: int) -> None:
        """Goes over to another cache of so many blocks; no sequence holds any."""
        self.blocks = BlockManager(blocks)
        self.tables[:] = 0  # what stands beyond a sequence's length must be a block of this cache

    # Sequences come and go.

    def drop_waiting(self, ids: Collection[tuple[str, int]]) -> list[Request]:
        """Removes and returns the requests of those ids that have no row yet."""
        dropped = [request for request in self.waiting if request.id in ids]
        self.waiting = deque(request for request in self.waiting if request.id not in ids)
        return dropped

    def remove(self, gone: NDArray[np.bool_]) -> Index:
        """Drops rows by a mask (count), here and in the table of sequences.

        Returns:
            where each row is now; -1 for those dropped.
        """
        for row in np.flatnonzero(gone).tolist():
            self._release(row)
        return self._rows.remove(gone)

    def forget(self) -> None:
        """Finds no block again that was computed before. Sequences that have written something go on over
        the blocks they hold; prompts are computed anew."""
        self._root += 1
        self.blocks.forget()
        for row in range(self._rows.count):
            self._digests[row] = None
            if not self._rows.produced[row] or not self._held[row]:
                self._release(row)

    def restart(self) -> None:
        """Takes nothing for granted of what was scheduled: every sequence is computed again from what was
        accepted for it."""
        self.blocks = BlockManager(self.blocks.blocks)
        rows = slice(0, self._rows.count)
        self._held[rows] = self.computed[rows] = 0
        self.length[rows] = self._prompt_length[rows] + self._rows.produced[rows]
        for row in range(self._rows.count):
            self._digests[row] = []

    def _release(self, row: int) -> None:
        self._remember(row, int(self.computed[row]))
        self.blocks.release(self._table(row))
        self._held[row] = self.computed[row] = 0
        self._digests[row] = []

    def _remember(self, row: int, computed: int) -> None:
        """Makes the row's full blocks known, once `computed` of its tokens are on their way to the cache."""
        known: list[bytes] | None = self._digests[row]
        if self._caching and known is not None:
            self._extend(known, self.content(row)[:computed])
            full = computed // self._block_size
            self.blocks.remember(self.tables[row, :full], known[:full])

    def _extend(self, known: list[bytes], ids: Index) -> None:
        chain(self._root.to_bytes(8), known, ids, self._block_size)

    def content(self, row: int) -> Index:
        """The row's prompt and what was accepted for it."""
        written = self._rows.tokens[row, : self._rows.produced[row]]
        return np.concatenate((self._rows.request[row].prompt_ids, written))

    # One step.

    def schedule(self) -> Plan | None:
        """The next step; None if no sequence can go on before drawn tokens are accepted. Tokens drawn by
        the last step may still be on their way, those of steps before it have been accepted."""
        preempted = self._counters.preemptions
        decode = self._decode()
        prompts = _Prompts(max(0, self._budget - len(decode)))
        self._continue(decode, prompts)
        if self._counters.preemptions == preempted:
            self._admit()
            self._start(prompts)
        if not len(decode) and not prompts.rows:
            return None
        plan = self._plan(decode, prompts)
        self.computed[plan.rows] = plan.first + plan.counts
        self.length[plan.sampled] += 1
        return plan

    def _decode(self) -> Index:
        """The rows whose one missing token is one they wrote, each with a block to put it in."""
        while True:
            rows = slice(0, self._rows.count)
            length, computed = self.length[rows], self.computed[rows]
            ready = (computed + 1 == length) & (length > self._prompt_length[rows])
            decode = np.flatnonzero(ready & (length < self._limit[rows]))
            full = decode[computed[decode] == self._held[decode] * self._block_size]
            if len(full) <= self.blocks.free:
                break
            holding = np.flatnonzero(self._held[rows])
            self._release(int(holding[self._arrival[holding].argmax()]))
            self._counters.preemptions += 1
        if len(full):
            self.tables[full, self._held[full]] = self.blocks.allocate(len(full))
            self._held[full] += 1
        return decode

    def _continue(self, decode: Index, prompts: _Prompts) -> None:
        """Adds what comes next of the prompts that were begun."""
        rows = slice(0, self._rows.count)
        begun = (self._held[rows] > 0) & (self.computed[rows] < self.length[rows])
        begun &= self.length[rows] < self._limit[rows]
        begun[decode] = False
        for row in self._by_arrival(begun):
            self._add(row, prompts)

    def _by_arrival(self, mask: NDArray[np.bool_]) -> list[int]:
        rows = np.flatnonzero(mask)
        ordered: list[int] = rows[self._arrival[rows].argsort()].tolist()
        return ordered

    def _add(self, row: int, prompts: _Prompts) -> None:
        """Adds the row's next tokens: all that are missing, or as many as the budget allows."""
        missing = int(self.length[row] - self.computed[row])
        count = min(missing, prompts.budget) if self._chunked else missing
        fresh = not self._rows.produced[row]
        if fresh:
            prompts.leaders[self._prompt[row]] = len(prompts.rows) if count == missing else None
        if not count:
            return
        if count == missing:
            prompts.sampled.append(row)
            prompts.source.append(len(prompts.rows))
        prompts.rows.append(row)
        prompts.counts.append(count)
        prompts.budget = max(0, prompts.budget - count)
        self._remember(row, int(self.computed[row]) + count)

    def _admit(self) -> None:
        """Gives rows to waiting requests."""
        free = self._rows.capacity - self._rows.count
        batch = min(free, len(self.waiting))
        enough = min(-(-self._rows.capacity // _ADMIT_SHARE), len(self.waiting))
        if not batch or (self._rows.count and free < enough):
            return
        requests = [self.waiting.popleft() for _ in range(batch)]
        rows = self._rows.add(requests)
        self.computed[rows] = self._held[rows] = 0
        self._arrival[rows] = np.arange(self._arrivals, self._arrivals + batch)
        self._arrivals += batch
        for row, request in zip(rows.tolist(), requests, strict=True):
            self.length[row] = self._prompt_length[row] = len(request.prompt_ids)
            self._limit[row] = len(request.prompt_ids) + request.params.max_tokens
            self._prompt[row] = np.ascontiguousarray(request.prompt_ids, dtype=np.int64).tobytes()
            self._digests[row] = []

    def _start(self, prompts: _Prompts) -> None:
        """Gives blocks to rows that have none, oldest first, until one finds no room."""
        for row in self._by_arrival(self._held[: self._rows.count] == 0):
            if self._rows.produced[row] or self._prompt[row] not in prompts.leaders:
                started = self._begin(row, prompts)
            else:
                leader = prompts.leaders[self._prompt[row]]
                started = leader is None or self._fork(row, leader, prompts)
            if not started:
                return

    def _begin(self, row: int, prompts: _Prompts) -> bool:
        """Starts to compute the row after whatever is known of it; its last token must be computed for
        the logits."""
        length, known = int(self.length[row]), self._digests[row]
        if self._caching:
            self._extend(known, self.content(row))
        found = self.blocks.find(known[: (length - 1) // self._block_size])
        reused = len(found) * self._block_size
        fits = length - reused <= prompts.budget or (
            prompts.budget > 0 if self._chunked else not prompts.rows
        )
        added = self.blocks_for(length) - len(found)
        if not fits or not self._spare(row, added + self.blocks.idle(found)):
            return False
        self.blocks.share(found)
        self.tables[row, : len(found)] = found
        self.tables[row, len(found) : len(found) + added] = self.blocks.allocate(added)
        self._held[row] = len(found) + added
        self.computed[row] = reused
        self._counters.cached_prefix_tokens += reused
        self._add(row, prompts)
        return True

    def _fork(self, row: int, leader: int, prompts: _Prompts) -> bool:
        """Lets the row share the prompt that prompts.rows[leader] completes in this step."""
        shared, rest = divmod(int(self.length[row]), self._block_size)
        if not self._spare(row, rest > 0):
            return False
        table = self._table(prompts.rows[leader])
        self.blocks.share(table[:shared])
        self.tables[row, :shared] = table[:shared]
        if rest:
            [copy] = self.tables[row, shared : shared + 1] = self.blocks.allocate(1)
            prompts.copies[0].append(int(table[shared]))
            prompts.copies[1].append(int(copy))
        self._held[row] = shared + (rest > 0)
        self.computed[row] = self.length[row]
        self._digests[row] = list(self._digests[prompts.rows[leader]])
        prompts.sampled.append(row)
        prompts.source.append(leader)
        return True

    def _spare(self, row: int, blocks: int) -> bool:
        """Whether the row can take that many blocks and still leave one to each sequence that will want
        another: it would soon be preempted else."""
        rows = slice(0, self._rows.count)
        if not self._held[rows].any():
            return True  # a cache holds the longest sequence
        most = self.blocks_for(self._limit[rows])
        growing = np.count_nonzero((self._held[rows] > 0) & (self._held[rows] < most))
        growing += self.blocks_for(int(self.length[row])) < most[row]
        return bool(self.blocks.free - blocks >= growing)

    def _plan(self, decode: Index, prompts: _Prompts) -> Plan:
        rows = np.concatenate((decode, np.array(prompts.rows, dtype=np.int64)))
        source = np.array(prompts.source, dtype=np.int64) + len(decode)
        return Plan(
            rows=rows,
            first=self.computed[rows],
            counts=np.concatenate((np.ones_like(decode), np.array(prompts.counts, dtype=np.int64))),
            decoding=len(decode),
            sampled=np.concatenate((decode, np.array(prompts.sampled, dtype=np.int64))),
            source=np.concatenate((np.arange(len(decode)), source)),
            copies=prompts.copies,
        )
