"""The scheduler of continuous batching, which chooses the tokens and cache blocks of each step.

A sequence needs computation as long as some of its tokens are not in the cache. Every step computes one token
for each sequence with exactly one missing token. The remaining token budget is used for prompts, oldest
first. If no block is free for a new token, the youngest sequence loses its blocks (preemption). A preempted
sequence keeps its tokens. It is computed again, as a longer prompt, before any younger sequence starts. The
order of all work depends only on the order of submission, never on a clock.

With some models, all rotary angles of a sequence change when it grows beyond a limit. Then the sequence loses
its blocks too, and is computed again with the new angles. Blocks are shared only by sequences whose angles
are the same.

Samples of one prompt share the prompt's blocks. The first sample computes the prompt. When the prompt is
complete, the other samples fork from the first. Each fork gets a copy of the last block if that block is not
full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tandem.engines.rollout.counters import Counters
from tandem.engines.rollout.draws.rows import Rows
from tandem.engines.rollout.native.blocks import chain
from tandem.engines.rollout.native.plan import Index, Plan
from tandem.engines.rollout.native.tables import BlockTables
from tandem.protocol import Request

# While other sequences run, waiting requests are admitted only when 1/16 of the rows is free. Prompts then
# arrive in groups, so more steps only decode, and such steps are cheaper.
_ADMIT_SHARE = 16


@dataclass(slots=True)
class _Draft:
    """An unfinished `Plan` to which rows are added. The decoding rows come first.

    Attributes:
        budget: The number of prompt tokens that may still be added.
        leaders: A dict whose keys are the prompts that are being computed. The value is the index in `rows`
            of the row that completes the prompt in this step, or None.
    """

    budget: int
    decoding: int
    rows: list[int]
    counts: list[int]
    sampled: list[int]
    source: list[int]
    copies: list[tuple[int, int]] = field(default_factory=list)
    leaders: dict[bytes, int | None] = field(default_factory=dict)


@dataclass(eq=False)
class Scheduler:
    """The scheduler that decides which sequences run in each step.

    The scheduler adds columns to `rows`, the table of all admitted sequences.

    Args:
        rows: The table of sequences. Its capacity is the maximum number of sequences that run at the same
            time.
        counters: The counters for preemptions and for prompt tokens found in the cache.
        max_length: The maximum number of tokens of a sequence.
        block_size: The number of tokens per block.
        max_num_batched_tokens: The maximum number of tokens of a step. This limit never delays decoding
            sequences.
        chunked: Whether a prompt may be computed in several steps. If not, a prompt that exceeds the budget
            is computed in a step without other prompts.
        caching: Whether prompts reuse cached blocks with the same content.

    Attributes:
        blocks: The block tables of the rows, and the pool of blocks.
        waiting: The queue of requests that have no row yet.
        computed: For each row, the number of tokens whose keys and values are in the cache, or are computed
            by a launched step.
        prompt_length: For each row, the number of tokens of its prompt.
        length: For each row, the number of its tokens, including sampled tokens that are not accepted yet.
        angle_limits: The limits of the model's rotary angles (see `Runner`).
    """

    rows: Rows
    counters: Counters
    max_length: int
    block_size: int
    max_num_batched_tokens: int
    chunked: bool
    caching: bool

    def __post_init__(self) -> None:
        column = self.rows.column
        self.blocks = BlockTables(self.rows, self.block_size, self.max_length)
        self.waiting: deque[Request] = deque()
        self.computed = column(np.int64)
        self.length = column(np.int64)
        self.angle_limits: tuple[int, ...] = ()
        self._level = column(np.int64)  # of the angles of the cached keys (see `AngleTables`)
        self.prompt_length = column(np.int64)
        self._arrival = column(np.int64)
        self._prompt = column(object, None)  # the prompt as bytes, to compare prompts
        self._digests = column(object, None)  # of full blocks; None if they must never be reused
        self._arrivals = 0
        self._root = 0  # the first input of all digests

    def most_at_once(self, prompt: int) -> int:
        """Return how many tokens of a sequence a step must be able to compute.

        If prompts are not divided, this is the whole sequence, which is computed again after a preemption.
        """
        return min(prompt, self.max_num_batched_tokens) if self.chunked else self.max_length

    @property
    def running(self) -> int:
        """Return how many sequences have blocks."""
        return int(np.count_nonzero(self.blocks.held[: self.rows.count]))

    @property
    def use(self) -> float:
        """Return the fraction of all blocks that are in use by sequences."""
        return self.blocks.in_use / self.blocks.pool.blocks if self.blocks.pool.blocks else 0.0

    @property
    def may_preempt(self) -> bool:
        """Return whether the next step may take the blocks of a sequence."""
        rows = slice(0, self.rows.count)
        held = self.blocks.held[rows]
        full = (held > 0) & (self.computed[rows] == held * self.block_size)
        return int(np.count_nonzero(full)) > self.blocks.free_entries

    # The methods below add and remove sequences.

    def drop_waiting(self, ids: Collection[tuple[str, int]]) -> list[Request]:
        """Remove and return the requests with these ids that have no row yet."""
        dropped = [request for request in self.waiting if request.id in ids]
        self.waiting = deque(request for request in self.waiting if request.id not in ids)
        return dropped

    def remove(self, gone: NDArray[np.bool_]) -> Index:
        """Remove the rows that are true in the mask `gone` (count), here and in the table of sequences.

        Returns:
            (count) The new number of each row, or -1 for a removed row.
        """
        for row in np.flatnonzero(gone).tolist():
            self._release(row)
        return self.rows.remove(gone)

    def forget(self) -> None:
        """Make sure that no prompt reuses a block that was computed before this call.

        Sequences that have generated tokens continue with their blocks. All other sequences are computed
        again.
        """
        self._root += 1
        self.blocks.pool.forget()
        for row in range(self.rows.count):
            self._digests[row] = None
            if not self.rows.produced[row] or not self.blocks.held[row]:
                self._release(row)

    def restart(self) -> None:
        """Discard the content of the cache and all scheduled work.

        Every sequence is computed again from its accepted tokens.
        """
        self.blocks.restart()
        rows = slice(0, self.rows.count)
        self.computed[rows] = 0
        self.length[rows] = self.prompt_length[rows] + self.rows.produced[rows]
        for row in range(self.rows.count):
            self._digests[row] = []

    def _release(self, row: int) -> None:
        self._remember(row, int(self.computed[row]))
        self.blocks.release(row)
        self.computed[row] = 0
        self._digests[row] = []

    def _remember(self, row: int, computed: int) -> None:
        """Record the row's full blocks for reuse.

        The first `computed` tokens of the row must be in the cache, or be computed by a launched step.
        """
        known: list[bytes] | None = self._digests[row]
        if self.caching and known is not None:
            self._extend(row, self.content(row)[:computed])
            self.blocks.remember(row, known[: computed // self.block_size])

    def _extend(self, row: int, ids: Index) -> None:
        root = self._root.to_bytes(8) + bytes([self._level[row]])
        chain(root, self._digests[row], ids, self.block_size)

    def content(self, row: int) -> Index:
        """Return the row's prompt and accepted tokens."""
        written = self.rows.tokens[row, : self.rows.produced[row]]
        return np.concatenate((self.rows.request[row].prompt_ids, written))

    # The methods below plan one step.

    def schedule(self) -> Plan | None:
        """Return the next step, or None if all sequences wait until their sampled tokens are accepted.

        The sampled tokens of the last step may still be in flight. All tokens of earlier steps must have been
        accepted.
        """
        self._release_outgrown()
        self.blocks.release_behind(self.computed[: self.rows.count])
        preempted = self.counters.preemptions
        decode = self._decode()
        count = len(decode)
        budget = max(0, self.max_num_batched_tokens - count)
        draft = _Draft(budget, count, decode.tolist(), [1] * count, decode.tolist(), list(range(count)))
        rows = slice(0, self.rows.count)
        begun = (self.blocks.held[rows] > 0) & (self.computed[rows] < self.length[rows])
        begun &= self.length[rows] - self.prompt_length[rows] < self.rows.max_tokens[rows]
        begun[decode] = False
        for row in self._by_arrival(begun):
            self._add(row, draft)
        if self.counters.preemptions == preempted:
            self._admit()
            self._start(draft)
        if not draft.rows:
            return None
        lists = (draft.rows, draft.counts, draft.sampled, draft.source)
        chosen, counts, sampled, source = (np.array(part, dtype=np.int64) for part in lists)
        first, levels = self.computed[chosen], self._level[chosen]
        plan = Plan(chosen, first, counts, levels, count, sampled, source, draft.copies)
        self.computed[chosen] += counts
        self.length[sampled] += 1
        return plan

    def _release_outgrown(self) -> None:
        """Release the rows whose length has passed a limit of the angles since they were started."""
        rows = slice(0, self.rows.count)
        outgrown = np.searchsorted(self.angle_limits, self.length[rows]) > self._level[rows]
        for row in np.flatnonzero(outgrown & (self.blocks.held[rows] > 0)).tolist():
            self._release(row)

    def _decode(self) -> Index:
        """Return the rows whose last generated token is to be computed, and give them blocks for it."""
        while True:
            rows = slice(0, self.rows.count)
            length, computed = self.length[rows], self.computed[rows]
            written = length - self.prompt_length[rows]
            ready = (computed + 1 == length) & (written > 0) & (written < self.rows.max_tokens[rows])
            decode = np.flatnonzero(ready)
            full = decode[computed[decode] == self.blocks.held[decode] * self.block_size]
            if len(full) <= self.blocks.free_entries:
                break
            holding = np.flatnonzero(self.blocks.held[rows])
            self._release(int(holding[self._arrival[holding].argmax()]))
            self.counters.preemptions += 1
        if len(full):
            self.blocks.append(full)
        return decode

    def _by_arrival(self, mask: NDArray[np.bool_]) -> list[int]:
        rows = np.flatnonzero(mask)
        ordered: list[int] = rows[self._arrival[rows].argsort()].tolist()
        return ordered

    def _add(self, row: int, draft: _Draft) -> None:
        """Add the row's missing tokens to the step, or as many as the budget and the free blocks allow."""
        computed = int(self.computed[row])
        missing = int(self.length[row]) - computed
        count = min(missing, draft.budget, self.blocks.reach(row) - computed) if self.chunked else missing
        fresh = not self.rows.produced[row]
        if fresh:
            draft.leaders[self._prompt[row]] = len(draft.rows) if count == missing else None
        if not count:
            return
        if count == missing:
            draft.sampled.append(row)
            draft.source.append(len(draft.rows))
        draft.rows.append(row)
        draft.counts.append(count)
        draft.budget = max(0, draft.budget - count)
        self.blocks.extend(row, computed + count)
        self._remember(row, computed + count)

    def _admit(self) -> None:
        """Move waiting requests to free rows of the table."""
        free = self.rows.capacity - self.rows.count
        batch = min(free, len(self.waiting))
        enough = min(-(-self.rows.capacity // _ADMIT_SHARE), len(self.waiting))
        if not batch or (self.rows.count and free < enough):
            return
        requests = [self.waiting.popleft() for _ in range(batch)]
        rows = self.rows.add(requests)
        self.blocks.clear(rows)
        self.computed[rows] = 0
        self._arrival[rows] = np.arange(self._arrivals, self._arrivals + batch)
        self._arrivals += batch
        for row, request in zip(rows.tolist(), requests, strict=True):
            self.length[row] = self.prompt_length[row] = len(request.prompt_ids)
            self._prompt[row] = np.ascontiguousarray(request.prompt_ids, dtype=np.int64).tobytes()
            self._digests[row] = []

    def _start(self, draft: _Draft) -> None:
        """Start the rows that have no blocks, oldest first, until a row cannot start.

        A row can start if there are enough free blocks and its sampled tokens are accepted.
        """
        for row in self._by_arrival(self.blocks.held[: self.rows.count] == 0):
            if self.length[row] > self.prompt_length[row] + self.rows.produced[row]:
                return
            if self.rows.produced[row] or self._prompt[row] not in draft.leaders:
                started = self._begin(row, draft)
            else:
                leader = draft.leaders[self._prompt[row]]
                started = leader is None or self._fork(row, leader, draft)
            if not started:
                return

    def _begin(self, row: int, draft: _Draft) -> bool:
        """Start a row, and add the tokens after its cached prefix to the step.

        The last token is always computed, even if it is cached, because its logits are needed.
        """
        length, known = int(self.length[row]), self._digests[row]
        self._level[row] = np.searchsorted(self.angle_limits, length)
        if self.caching:
            self._extend(row, self.content(row))
        found = self.blocks.find(known[: (length - 1) // self.block_size])
        reused = found.length * self.block_size
        alone = len(draft.rows) == draft.decoding
        fits = length - reused <= draft.budget or (draft.budget > 0 if self.chunked else alone)
        added = self.blocks.groups.blocks(length - reused, self.most_at_once(length), self.block_size)
        if not fits or not self._spare(row, added + self.blocks.pool.idle(np.concatenate(found.blocks))):
            return False
        self.blocks.share(row, found)
        self.computed[row] = reused
        self.counters.cached_prefix_tokens += reused
        self._add(row, draft)
        return True

    def _fork(self, row: int, leader: int, draft: _Draft) -> bool:
        """Let the row share the blocks of the prompt that draft.rows[leader] completes in this step."""
        length = int(self.length[row])
        if not self._spare(row, len(self.blocks.tables) if length % self.block_size else 0):
            return False
        draft.copies += self.blocks.fork(row, draft.rows[leader], length)
        self.computed[row], self._level[row] = length, self._level[draft.rows[leader]]
        self._digests[row] = list(self._digests[draft.rows[leader]])
        draft.sampled.append(row)
        draft.source.append(leader)
        return True

    def _spare(self, row: int, blocks: int) -> bool:
        """Return whether enough blocks are free for the row, with one block left for each growing sequence.

        Without this margin, a sequence would soon be preempted.
        """
        rows = slice(0, self.rows.count)
        held = self.blocks.held[rows]
        if not held.any():
            return True  # the cache is always large enough for the longest sequence
        most = self.blocks.blocks_for(self.prompt_length[rows] + self.rows.max_tokens[rows])
        growing = np.count_nonzero((held > 0) & (held < most))
        growing += self.blocks.blocks_for(int(self.length[row])) < most[row]
        return bool(self.blocks.pool.free - blocks >= growing * len(self.blocks.tables))
