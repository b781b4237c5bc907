"""Tests of what only the native engine does: sharing, batching, memory."""

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native import memory
from tandem.errors import EngineError
from tests.engines.rollout.case import PER_TOKEN, native, request, tokens
from tests.engines.rollout.case import drain as drain_only

either_order = pytest.mark.parametrize("run_ahead", [False, True])


def drain(engine):
    """Return the samples of all pending requests by id. No block of the cache is lost."""
    samples = drain_only(engine)
    engine._scheduler.check()
    assert engine._scheduler.blocks.free == engine._scheduler.blocks.blocks
    return samples


def written_by(engine, asked):
    engine.submit(asked)
    samples = drain(engine)
    return tokens(samples[each.id] for each in asked)


def test_the_next_turn_computes_only_what_is_new(tiny):
    model = tiny(dtype=torch.float64)
    engine = native(model)
    [answer] = tokens(generate(engine, [request("turn 1", prompt=20, max_tokens=30)]))
    assert engine.stats()["prefill_tokens"] == 20
    second = request("turn 2", prompt=[*range(1, 21), *answer, 1, 2, 3], max_tokens=10)
    reply = generate(engine, [second])
    stats = engine.stats()
    assert (stats["cached_prefix_tokens"], stats["prefill_tokens"]) == (48, 5)
    assert tokens(reply) == tokens(generate(native(model), [second]))
    engine.update_weights(SharedModule(model), 1)
    generate(engine, [second])
    assert engine.stats()["prefill_tokens"] == 53


@pytest.mark.parametrize(
    ("options", "samples", "prefilled"),
    [({"max_num_seqs": 2}, 4, 80), ({"max_num_batched_tokens": 16}, 1, 16 + 40)],
    ids=["samples wait", "half computed"],
)
def test_a_prompt_is_computed_anew_under_new_weights(tiny, options, samples, prefilled):
    engine = native(tiny(), **options)
    engine.submit([request("a", sample, 40, max_tokens=3) for sample in range(samples)])
    engine.poll(0.0)
    engine.update_weights(SharedModule(tiny()), 1)
    assert drain(engine)["a", samples - 1].versions.tolist() == [1, 1, 1]
    assert engine.stats()["prefill_tokens"] == prefilled


def test_memory_bounds_what_runs(tiny, make_requests, monkeypatch):
    budget, model, requests = 64 * 16 * PER_TOKEN, tiny(), make_requests(30, max_tokens=20)
    free = tokens(generate(native(model), requests))
    monkeypatch.setattr(memory, "cache_budget", lambda device, share, weights: int(share * budget))
    for share in (1.0, 0.25):
        engine = native(model, gpu_memory_utilization=share)
        assert tokens(generate(engine, requests)) == free
        stats = engine.stats()
        assert stats["cache_bytes"] == share * budget
        assert stats["peak_running"] <= share * 64
        assert 0.8 < stats["cache_use"] <= 1


def few_and_large():
    few = [request(f"a{i}", prompt=[1 + i], max_tokens=20) for i in range(2)]
    return few, [request(f"b{i}", prompt=59, max_tokens=9) for i in range(9)]


def test_the_cache_is_no_larger_than_what_is_asked_for(tiny):
    engine, (few, large) = native(tiny(), max_num_seqs=3), few_and_large()
    engine.submit(few)
    engine.poll(0.0)
    assert engine._store.cache.blocks == 2 * 2
    engine.submit(large)  # the first two are still running, and continue in the larger cache
    samples = drain(engine)
    assert engine._store.cache.blocks == 3 * 5
    assert tokens(samples[each.id] for each in few) == tokens(generate(native(tiny()), few))


def test_the_use_of_the_cache_does_not_depend_on_what_was_asked_before(tiny):
    few, large = few_and_large()
    found = []
    for before in ([], large):
        engine = native(tiny(), max_num_seqs=3)
        written_by(engine, before)
        engine.update_weights(SharedModule(tiny()), 1)
        engine.stats()
        written_by(engine, few)
        found.append(engine.stats())
    assert found[0] == found[1]
    assert found[0]["cache_use"] == 1


def test_cache_too_small_for_one_sequence_says_what_fits(tiny, monkeypatch):
    asked = request(prompt=90, max_tokens=38)
    monkeypatch.setattr(memory, "cache_budget", lambda device, share, weights: 100 * PER_TOKEN)
    for options in ({}, {"num_gpu_blocks_override": 6}):
        key = next(iter(options), "gpu_memory_utilization")
        with pytest.raises(EngineError, match=f"(?s){key}.*8 blocks.*96 tokens"):
            native(tiny(), **options).submit([asked])
    engine = native()  # it does not know the model yet
    engine.submit([asked])
    engine.update_weights(SharedModule(tiny()), 0)
    with pytest.raises(EngineError, match=r"(?s)gpu_memory_utilization.*8 blocks.*96 tokens"):
        engine.poll(1.0)
    engine.abort([asked.id])
    engine.sleep()


def test_a_request_that_no_block_override_can_hold_harms_no_other(tiny):
    """No request of this call is queued, with weights or without."""
    good, bad = request("a", prompt=9, max_tokens=8), request("b", prompt=90, max_tokens=8)
    for model in (tiny(), None):
        engine = native(model, num_gpu_blocks_override=2)
        with pytest.raises(EngineError, match="32 tokens"):
            engine.submit([good, bad])
        assert engine.pending() == 0
        engine.submit([good])
        engine.update_weights(SharedModule(tiny()), 0)
        assert set(drain(engine)) == {good.id}


@either_order
@pytest.mark.parametrize(("prompt", "blocks"), [(60, 8), (110, 16)], ids=["stays", "is replaced"])
def test_a_cache_that_cannot_grow_beside_itself(tiny, monkeypatch, prompt, blocks, run_ahead):
    """There is memory for 8 blocks and 8 more, never for 8 and 16.

    A cache that holds the longest sequence stays in use. Otherwise its running sequences are computed again
    in a larger cache.
    """
    room, lengths = 16 * 16 * PER_TOKEN, (68, prompt, prompt + 1)
    params = {"max_tokens": 60, "repetition_penalty": 1.1}
    asked = [request(str(n), prompt=np.arange(n) % 97, **params) for n in lengths]
    alone = [tokens(generate(native(tiny(), max_length=256), [each]))[0] for each in asked]
    monkeypatch.setattr(memory, "cache_budget", lambda device, share, weights: room)
    engine = native(tiny(), max_length=256, run_ahead=run_ahead)
    store = engine._store
    monkeypatch.setattr(memory, "host_free", lambda: room - (store.cache.bytes if store.cache else 0))
    engine.submit(asked[:1])
    for _ in range(5):
        engine.poll(0.0)
    assert store.cache.blocks == 8
    engine.submit(asked[1:])
    samples = drain(engine)
    assert store.cache.blocks == blocks
    assert tokens(samples[each.id] for each in asked) == alone


def test_abort_loses_nothing_that_has_finished_meanwhile(tiny):
    """The last token is drawn but not accepted yet when the request is aborted."""
    engine, asked = native(tiny(), run_ahead=True), request(max_tokens=1)
    engine.submit([asked])
    engine.poll(0.0)
    [sample] = engine.abort([asked.id], keep_partial=True)
    assert (len(sample.token_ids), sample.finish_reason) == (1, "length")
    assert engine.pending() == 0 and engine.poll(0.0) == []


@either_order
def test_a_step_that_failed_is_taken_back(tiny, make_requests, run_ahead):
    """Penalties count tokens on the device. Tokens of the lost step must not stay counted there."""
    model, calls = tiny(dtype=torch.float64), []
    requests = make_requests(12, 2, max_tokens=12, repetition_penalty=1.2)
    engine = native(model, run_ahead=run_ahead)
    forward = engine._steps.runner.forward

    def failing(step, attention):
        calls.append(len(step.ids_T))
        if len(calls) in (1, 5):
            raise MemoryError
        return forward(step, attention)

    engine._steps.runner.forward = failing
    engine.submit(requests)
    for _ in range(2):
        with pytest.raises(MemoryError):
            drain(engine)
    samples = drain(engine)
    assert tokens(samples[each.id] for each in requests) == tokens(generate(native(model), requests))
