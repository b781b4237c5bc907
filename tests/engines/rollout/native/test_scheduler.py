"""Tests of the plans of an engine whose blocks have 4 tokens."""

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import SharedModule
from tests.engines.rollout.case import drain, native, request


@pytest.fixture
def make(tiny):
    """Return a function that makes an engine which keeps its plans. Requests are submitted to it."""

    def make(blocks, *requests, **options):
        options = {"block_size": 4, "max_length": 64, "num_gpu_blocks_override": blocks, **options}
        engine = native(tiny(dtype=torch.float64), **options)
        schedule, engine.plans = engine._scheduler.schedule, []

        def planned():
            plan = schedule()
            engine.plans += [] if plan is None else [plan]
            return plan

        engine._scheduler.schedule = planned
        engine.submit(requests)
        return engine

    return make


def step(engine, *requests):
    engine.submit(requests)
    return [sample.uid for sample in engine.poll(0.0)]


def prefilled(engine):
    return sum(int(plan.counts[plan.decoding :].sum()) for plan in engine.plans)


def finish(engine):
    drain(engine)
    engine._scheduler.blocks.check()
    assert engine._scheduler.blocks.in_use == 0


def test_samples_compute_their_prompt_once(make):
    engine = make(100, *(request("a", s, 10, max_tokens=4) for s in range(16)))  # two blocks and a half
    step(engine)
    [plan] = engine.plans
    assert (plan.counts.tolist(), plan.sampled.tolist()) == ([10], list(range(16)))
    assert plan.source.tolist() == [0] * 16
    assert [len(set(part)) for part in zip(*plan.copies, strict=True)] == [1, 15] and len(plan.copies) == 15
    assert engine._scheduler.blocks.pool.free == 100 - 2 - 16
    finish(engine)
    assert prefilled(engine) == 10


def test_samples_wait_for_a_prompt_in_chunks(make):
    requests = [request("a", sample, 16, max_tokens=4) for sample in range(4)]
    engine = make(100, *requests, max_num_batched_tokens=6)
    finish(engine)
    plans = [(plan.counts.tolist(), len(plan.sampled)) for plan in engine.plans[:3]]
    assert plans == [([6], 0), ([6], 0), ([4], 4)] and prefilled(engine) == 16


def test_the_budget_goes_to_decoding_first(make):
    short = (request(uid, prompt=[1 + i], max_tokens=9) for i, uid in enumerate("ab"))
    engine = make(100, *short, max_num_batched_tokens=6)
    step(engine)
    step(engine, request("c", prompt=10), request("d", prompt=[3]))
    step(engine)
    step(engine)
    assert [plan.counts.tolist() for plan in engine.plans[1:]] == [[1, 1, 4], [1, 1, 4], [1, 1, 2, 1]]


def test_a_long_prompt_runs_alone_when_chunks_are_off(make):
    requests = [request(str(i), prompt=np.full(n, i), max_tokens=4) for i, n in enumerate((8, 30, 4, 4, 4))]
    engine = make(100, *requests, max_num_batched_tokens=10, enable_chunked_prefill=False)
    finish(engine)
    shares = [plan.counts[plan.decoding :].tolist() for plan in engine.plans]
    assert [share for share in shares if share] == [[8], [30], [4, 4], [4]]


@pytest.mark.parametrize(
    ("steps", "forgets", "caching", "cached"),
    [(99, False, True, 4), (99, False, False, 0), (99, True, True, 0), (2, True, True, 0)],
)
def test_what_is_found_again(make, tiny, steps, forgets, caching, cached):
    engine = make(100, request("a", prompt=8, max_tokens=9), enable_prefix_caching=caching)
    while engine.pending() and steps:
        step(engine)
        steps -= 1
    if forgets:
        engine.update_weights(SharedModule(tiny(dtype=torch.float64)), 1)
    finish(engine)
    engine.submit([request("b", prompt=8, max_tokens=4)])
    finish(engine)
    assert (engine.stats()["cached_prefix_tokens"], prefilled(engine)) == (cached, 16 - cached)


def test_the_youngest_gives_way_and_comes_back_first(make):
    requests = [request(uid, prompt=[i, i, i], max_tokens=17) for i, uid in enumerate("012")]
    engine = make(6, *requests, enable_prefix_caching=False)
    order = step(engine) + step(engine, request("late", max_tokens=17))
    while engine.pending():
        order += step(engine)
    assert engine.stats()["preemptions"] > 0 and order == ["0", "1", "2", "late"]


def test_a_sequence_starts_only_if_those_that_run_can_go_on(make):
    engine = make(5, *(request(str(i), prompt=[i, 1, 2], max_tokens=5) for i in range(3)))
    step(engine)
    assert len(engine.plans[0].sampled) == 2
    finish(engine)
    assert engine.stats()["preemptions"] == 0


def test_requests_wait_for_a_sixteenth_of_the_rows(make):
    requests = [request(str(i), prompt=[i], max_tokens=4 + i % 29) for i in range(64)]
    engine = make(1000, *requests, max_num_seqs=32)
    finish(engine)
    admitted = [len(plan.counts) - plan.decoding for plan in engine.plans]
    assert admitted[0] == 32 and min(count for count in admitted[1:] if count) == 2
