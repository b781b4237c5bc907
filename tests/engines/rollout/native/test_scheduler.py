"""Tests of the scheduler over a cache that records which token of which prefix is in which slot."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.engines.rollout.counters import Counters
from tandem.engines.rollout.draws.rows import Rows
from tandem.engines.rollout.native.blocks import BlockManager
from tandem.engines.rollout.native.scheduler import Scheduler
from tandem.protocol import Request, SamplingParams

BLOCK = 4


def request(uid, prompt, max_tokens=4, sample=0):
    return Request(str(uid), sample, np.asarray(prompt), SamplingParams(max_tokens=max_tokens))


class Machine:
    """A machine that runs plans.

    A slot holds the whole prefix that ends with its token. So a test notices if a slot is read for a wrong
    sequence, or before it is written. The next token follows from the prefix alone.

    Args:
        ahead: Whether a step is planned before the tokens of the last step are accepted.
    """

    def __init__(self, blocks, *, seqs=8, budget=1000, chunked=True, caching=True, ahead=False):
        self.counters, self.rows, self.ahead = Counters(None), Rows(seqs), ahead
        options = {"max_length": 64, "block_size": BLOCK, "max_num_batched_tokens": budget}
        options |= {"chunked": chunked, "caching": caching}
        self.scheduler = Scheduler(self.rows, self.counters, **options)
        self.scheduler.blocks = BlockManager(blocks)
        self.slots, self.answers, self.plans = {}, {}, []
        self.flight = []  # (row, token)

    def submit(self, *requests):
        self.scheduler.waiting.extend(requests)

    def busy(self):
        return bool(self.rows.count or self.scheduler.waiting)

    def step(self):
        plan = self.scheduler.schedule()
        assert self.ahead or plan is not None
        landing, self.flight = self.flight, []
        if plan is not None:
            self.plans.append(plan)
            self.run(plan, dict(landing))
        self.accept(landing)
        if not self.ahead:
            self.land()
        self.scheduler.check()

    def land(self):
        landing, self.flight = self.flight, []
        self.accept(landing)

    def run(self, plan, in_flight):
        assert len(set(plan.rows.tolist())) == len(plan.rows)
        ends = []
        for row, first, count in zip(plan.rows, plan.first, plan.counts, strict=True):
            ids = self.scheduler.content(row).tolist()
            ids += [in_flight[row]] if row in in_flight else []
            slots = [self.scheduler.tables[row, t // BLOCK] * BLOCK + t % BLOCK for t in range(first + count)]
            for t in range(first, first + count):
                self.slots[slots[t]] = tuple(ids[: t + 1])
            ends.append((row, first + count, ids[: first + count], slots))
        for _, _, ids, slots in ends:  # as in a layer, all writes come before the reads
            assert all(self.slots[slot] == tuple(ids[: t + 1]) for t, slot in enumerate(slots))
        for source, target in zip(*plan.copies, strict=True):
            for offset in range(BLOCK):
                self.slots[target * BLOCK + offset] = self.slots.get(source * BLOCK + offset)
        for row, source in zip(plan.sampled, plan.source, strict=True):
            self.flight.append((int(row), next_token(ends[source][2])))

    def accept(self, tokens):
        done = np.zeros(self.rows.count, dtype=bool)
        for row, token in tokens:
            if row >= 0:
                self.rows.tokens[row, self.rows.produced[row]] = self.rows.last_token[row] = token
                self.rows.produced[row] += 1
                full = self.rows.produced[row] == self.rows.max_tokens[row]
                done[row] = full or token in self.rows.request[row].params.stop_token_ids
        for row in np.flatnonzero(done):
            self.answers[self.rows.request[row].id] = self.rows.sample(int(row), "").token_ids.tolist()
        if done.any():
            self.remove(done)

    def remove(self, gone):
        moved = self.scheduler.remove(gone)
        self.flight = [(int(moved[row]) if row >= 0 else -1, token) for row, token in self.flight]

    def finish(self, limit=2000):
        while self.busy() and limit:
            self.step()
            limit -= 1
        assert not self.busy()
        assert self.scheduler.blocks.free == self.scheduler.blocks.blocks
        return self.answers


def next_token(prefix):
    return (7 * sum(prefix) + len(prefix)) % 50


def expected(requests):
    out = {}
    for item in requests:
        ids = item.prompt_ids.tolist()
        for _ in range(item.params.max_tokens):
            ids.append(next_token(ids))
            if ids[-1] in item.params.stop_token_ids:
                break
        out[item.id] = ids[len(item.prompt_ids) :]
    return out


def prefilled(machine):
    return sum(int(plan.counts[plan.decoding :].sum()) for plan in machine.plans)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_any_load_is_computed_right(seed, ahead):
    """Random prompts with common prefixes, several samples, arrivals and aborts.

    The caches are large, or so small that sequences are preempted.
    """
    rng = np.random.default_rng(seed)
    machine = Machine(
        int(rng.choice([12, 16, 20, 100])),
        seqs=int(rng.integers(2, 10)),
        budget=int(rng.choice([3, 10, 1000])),
        chunked=bool(rng.integers(2)),
        caching=bool(rng.integers(2)),
        ahead=ahead,
    )
    roots = [rng.integers(0, 50, size=20) for _ in range(3)]
    requests = []
    for uid in range(14):
        prompt = np.concatenate((roots[uid % 3][: rng.integers(1, 21)], rng.integers(0, 50, rng.integers(4))))
        for sample in range(rng.integers(1, 5)):
            params = SamplingParams(max_tokens=int(rng.integers(1, 24)), stop_token_ids=(3, 5))
            requests.append(Request(str(uid), sample, prompt, params))
    aborted = set()
    for start in range(0, len(requests), 5):
        machine.submit(*requests[start : start + 5])
        for _ in range(rng.integers(6)):
            if machine.busy():
                machine.step()
        if machine.rows.count and start % 2:
            machine.land()
            gone = rng.random(machine.rows.count) < 0.2
            aborted |= {item.id for item in machine.rows.request[: machine.rows.count][gone]}
            machine.remove(gone)
            aborted |= {item.id for item in machine.scheduler.drop_waiting({requests[start].id})}
            machine.scheduler.check()
    answers = machine.finish()
    wanted = expected(requests)
    assert answers == {id: wanted[id] for id in wanted if id not in aborted}


def test_samples_compute_their_prompt_once():
    machine = Machine(100, seqs=16)
    requests = [request("a", np.arange(10), sample=s) for s in range(16)]  # two blocks and a half
    machine.submit(*requests)
    machine.step()
    [plan] = machine.plans
    assert (plan.counts.tolist(), plan.sampled.tolist()) == ([10], list(range(16)))
    assert plan.source.tolist() == [0] * 16
    assert len(plan.copies[0]) == 15 and len(set(plan.copies[0])) == 1 and len(set(plan.copies[1])) == 15
    assert machine.scheduler.blocks.free == 100 - 2 - 16
    assert machine.finish() == expected(requests)
    assert prefilled(machine) == 10


def test_samples_wait_for_a_prompt_in_chunks():
    machine = Machine(100, budget=6)
    requests = [request("a", np.arange(16), sample=s) for s in range(4)]
    machine.submit(*requests)
    assert machine.finish() == expected(requests)
    plans = [(plan.counts.tolist(), len(plan.sampled)) for plan in machine.plans[:3]]
    assert plans == [([6], 0), ([6], 0), ([4], 4)]
    assert prefilled(machine) == 16


def test_the_budget_goes_to_decoding_first():
    machine = Machine(100, budget=6)
    machine.submit(request("a", [1], 9), request("b", [2], 9))
    machine.step()
    machine.submit(request("c", np.arange(10)), request("d", [3]))
    for _ in range(3):
        machine.step()
    assert [plan.counts.tolist() for plan in machine.plans[1:]] == [[1, 1, 4], [1, 1, 4], [1, 1, 2, 1]]


def test_a_long_prompt_runs_alone_when_chunks_are_off():
    machine = Machine(100, budget=10, chunked=False)
    machine.submit(*(request(i, np.full(n, i)) for i, n in enumerate((8, 30, 4, 4, 4))))
    machine.finish()
    shares = [plan.counts[plan.decoding :].tolist() for plan in machine.plans]
    assert [share for share in shares if share] == [[8], [30], [4, 4], [4]]


@pytest.mark.parametrize(
    ("prompt", "steps", "forgets", "cached", "computed"),
    [
        (range(8), 99, False, 4, 8 + 4),  # a prompt that is known whole computes its last block
        (range(20), 99, False, 16, 8 + 4),  # the next turn finds what was written
        (range(8), 99, True, 0, 8 + 8),
        (range(8), 2, True, 0, 8 + 8),  # a sequence that goes on leaves blocks that mix old and new keys
    ],
)
def test_what_is_found_again(prompt, steps, forgets, cached, computed):
    machine = Machine(100)
    first = request("a", np.arange(8), 9)
    machine.submit(first)
    for _ in range(steps):
        if machine.busy():
            machine.step()
    if forgets:
        machine.scheduler.forget()
    turn = [*range(8), *machine.finish()["a", 0], 1, 2, 3]
    second = request("b", turn[: len(prompt)])
    machine.submit(second)
    assert machine.finish() == expected([first, second])
    assert (machine.counters.cached_prefix_tokens, prefilled(machine)) == (cached, computed)


def test_a_prompt_in_the_middle_is_computed_anew_after_forget():
    machine = Machine(100, budget=4)
    machine.submit(request("a", np.arange(8)))
    machine.step()
    machine.scheduler.forget()
    machine.slots.clear()
    machine.finish()
    assert prefilled(machine) == 4 + 8


def test_the_youngest_gives_way_and_comes_back_first():
    machine = Machine(6, caching=False)
    requests = [*(request(i, [i, i, i], 17) for i in range(3)), request("late", [9], 17)]
    machine.submit(*requests[:3])
    machine.step()
    machine.submit(requests[3])
    order = []
    while machine.busy():
        before = set(machine.answers)
        machine.step()
        order += sorted(set(machine.answers) - before)
    assert machine.counters.preemptions > 0
    assert order == [item.id for item in requests]
    assert machine.answers == expected(requests)


def test_a_sequence_starts_only_if_those_that_run_can_go_on():
    """There are five blocks. Each of three sequences needs one now and will need a second one."""
    machine = Machine(5)
    machine.submit(*(request(i, [i, 1, 2], 5) for i in range(3)))
    machine.step()
    assert len(machine.plans[0].sampled) == 2
    machine.finish()
    assert machine.counters.preemptions == 0


def test_requests_wait_for_a_sixteenth_of_the_rows():
    machine = Machine(1000, seqs=32)
    machine.submit(*(request(i, [i], 4 + i % 29) for i in range(64)))
    machine.finish()
    admitted = [len(plan.counts) - plan.decoding for plan in machine.plans]
    assert admitted[0] == 32
    assert min(count for count in admitted[1:] if count) == 2


def test_restart_computes_everything_again_from_what_was_accepted():
    machine = Machine(100, ahead=True)
    requests = [request("a", np.arange(7), 9), request("b", np.arange(5), 9)]
    machine.submit(*requests)
    for _ in range(4):
        machine.step()
    machine.flight = []
    machine.slots.clear()
    machine.scheduler.restart()
    assert machine.finish() == expected(requests)
