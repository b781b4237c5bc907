"""Tests of what only the native engine does: sharing, batching, memory."""

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native import memory
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.errors import EngineError
from tandem.protocol import Request, SamplingParams

CPU = torch.device("cpu")
PER_TOKEN = 256  # bytes of tiny qwen2 in float32: 2 layers * 2 heads * (8 + 8) * 4


def make(model, **options):
    engine = NativeEngine(**{"device": CPU, "max_length": 128, **options})
    engine.update_weights(SharedModule(model), 0)
    return engine


def drain(engine):
    samples = []
    while engine.pending():
        samples += engine.poll(10.0)
    engine._scheduler.check()
    assert engine._scheduler.blocks.free == engine._scheduler.blocks.blocks
    return {sample.id: sample for sample in samples}


def mixed_load(rng):
    """Return 30 requests with common prefixes, 1 to 4 samples each, and all ways to sample and to end."""
    roots = [rng.integers(1, 97, size=40) for _ in range(3)]
    requests = []
    while len(requests) < 30:
        prompt = np.concatenate((roots[rng.integers(3)][: rng.integers(40)], rng.integers(1, 97, size=3)))
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([-1, 5])),
            top_p=float(rng.choice([0.8, 1.0])),
            max_tokens=int(rng.integers(1, 30)),
            stop_token_ids=tuple(rng.integers(0, 97, size=rng.integers(4)).tolist()),
            stop=(chr(0x100 + int(rng.integers(97))),) if rng.random() < 0.3 else (),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            min_tokens=int(rng.choice([0, 1])),
        )
        uid = str(len(requests))
        requests += [Request(uid, sample, prompt, params) for sample in range(rng.integers(1, 5))]
    return requests


def decode(token_ids):
    return "".join(chr(0x100 + token) for token in token_ids)


@pytest.fixture(scope="module")
def crowd(tiny):
    """Return a model, requests, and what each request generates alone, by id."""
    model = tiny(dtype=torch.float64)
    requests = mixed_load(np.random.default_rng(7))
    alone = make(model, decode=decode)
    return model, requests, {request.id: generate(alone, [request])[0] for request in requests}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": True},
        {"num_gpu_blocks_override": 20, "block_size": 4, "run_ahead": True},
        {"num_gpu_blocks_override": 20, "block_size": 4, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 7, "run_ahead": True},
        {"max_num_batched_tokens": 7, "enable_chunked_prefill": False, "max_num_seqs": 5},
        {"max_num_seqs": 3, "block_size": 8, "runner": "module"},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_no_company_changes_a_sample(crowd, options):
    """Each request generates in a crowd, with arrivals and aborts, what it generates alone."""
    model, requests, expected = crowd
    engine = make(model, decode=decode, **options)
    written, aborted = {}, {}
    for start in range(0, len(requests), 6):
        engine.submit(requests[start : start + 6])
        written.update((sample.id, sample) for sample in engine.poll(0.0))
        if start % 4 == 0:
            ids = [requests[start].id, requests[start + 3].id]
            aborted.update((sample.id, sample) for sample in engine.abort(ids, keep_partial=True))
        engine._scheduler.check()
    written.update(drain(engine))
    assert set(written) | set(aborted) == set(expected)
    for id, sample in (written | aborted).items():
        count = len(sample.token_ids)
        assert sample.token_ids.tolist() == expected[id].token_ids[:count].tolist()
        np.testing.assert_allclose(sample.log_probs, expected[id].log_probs[:count], atol=1e-9, rtol=0)
        assert id in aborted or sample.finish_reason == expected[id].finish_reason
    assert (engine.stats()["preemptions"] > 0) == ("num_gpu_blocks_override" in options)


@pytest.mark.parametrize(("n", "max_num_seqs"), [(16, 256), (8, 3)])
def test_samples_share_their_prompts_prefill(tiny, n, max_num_seqs):
    """Samples admitted later find the prompt's full blocks and compute the rest again."""
    prompts = [np.full(length, length) for length in (32, 35, 41, 48)]
    requests = [
        Request(str(p), sample, prompt, SamplingParams(max_tokens=9))
        for p, prompt in enumerate(prompts)
        for sample in range(n)
    ]
    engine = make(tiny(), max_num_seqs=max_num_seqs)
    generate(engine, requests)
    stats = engine.stats()
    once = sum(len(prompt) for prompt in prompts)
    assert stats["peak_running"] == min(4 * n, max_num_seqs)
    if max_num_seqs == 256:
        assert stats["prefill_tokens"] == once
    else:
        assert once < stats["prefill_tokens"] < once + 4 * n * 16
        assert stats["cached_prefix_tokens"] > once


def test_the_next_turn_computes_only_what_is_new(tiny):
    model = tiny(dtype=torch.float64)
    engine = make(model)
    first = Request("turn 1", 0, np.arange(1, 21), SamplingParams(max_tokens=30))
    [answer] = generate(engine, [first])
    assert engine.stats()["prefill_tokens"] == 20
    longer = np.concatenate((first.prompt_ids, answer.token_ids, [1, 2, 3]))
    second = Request("turn 2", 0, longer, SamplingParams(max_tokens=10))
    [reply] = generate(engine, [second])
    stats = engine.stats()
    assert (stats["cached_prefix_tokens"], stats["prefill_tokens"]) == (48, 5)
    [fresh] = generate(make(model), [second])
    assert reply.token_ids.tolist() == fresh.token_ids.tolist()
    engine.update_weights(SharedModule(model), 1)
    generate(engine, [second])
    assert engine.stats()["prefill_tokens"] == 53


def test_without_prefix_caching_nothing_is_found(tiny):
    engine = make(tiny(), enable_prefix_caching=False)
    request = Request("a", 0, np.arange(1, 41), SamplingParams(max_tokens=3))
    generate(engine, [request])
    generate(engine, [request])
    stats = engine.stats()
    assert (stats["prefill_tokens"], stats["cached_prefix_tokens"]) == (80, 0)


def test_finished_sequences_make_room_at_once(tiny):
    """Two rows, one long sequence and many short ones: the short sequences pass the long one."""
    engine = make(tiny(), max_num_seqs=2)
    lengths = [45] + [4] * 10
    requests = [
        Request(f"p{i}", 0, np.array([1, 2]), SamplingParams(max_tokens=n)) for i, n in enumerate(lengths)
    ]
    engine.submit(requests)
    order = []
    while engine.pending():
        order += [sample.uid for sample in engine.poll(10.0)]
    assert order == [f"p{i}" for i in range(1, 11)] + ["p0"]
    assert engine.stats()["decode_steps"] <= 45


def test_the_budget_bounds_the_tokens_of_a_step(tiny):
    engine = make(tiny(), max_num_batched_tokens=20)
    tokens = []
    forward = engine._steps.runner.forward
    engine._steps.runner.forward = lambda step, attention: (
        tokens.append(len(step.ids_T)),
        forward(step, attention),
    )[1]
    prompts = [np.full(n, i) for i, n in enumerate([8, 8, 8, 50, 4, 4])]
    generate(engine, [Request(f"p{i}", 0, p, SamplingParams(max_tokens=6)) for i, p in enumerate(prompts)])
    assert max(tokens) == 20
    assert sum(tokens) == sum(map(len, prompts)) + 6 * 5


def test_weights_updated_in_flight_are_marked_token_by_token(tiny):
    model = tiny()
    for run_ahead in (False, True):
        engine = make(model, run_ahead=run_ahead)
        engine.submit([Request("a", 0, np.array([1, 2, 3]), SamplingParams(max_tokens=20))])
        engine.poll(0.0)
        engine.poll(0.0)
        engine.update_weights(SharedModule(model), 5)
        [sample] = engine.poll(10.0)
        assert sample.versions.tolist() == [0] * 2 + [5] * 18


def test_a_prompt_is_computed_anew_under_new_weights(tiny):
    """One prompt has waiting samples, and one is half computed."""
    engine = make(tiny(), max_num_seqs=2)
    requests = [Request("a", s, np.arange(1, 41), SamplingParams(max_tokens=3)) for s in range(4)]
    engine.submit(requests)
    engine.poll(0.0)
    engine.update_weights(SharedModule(tiny()), 1)
    drain(engine)
    assert engine.stats()["prefill_tokens"] == 80
    engine = make(tiny(), max_num_batched_tokens=16)
    engine.submit(requests[:1])
    engine.poll(0.0)
    engine.update_weights(SharedModule(tiny()), 1)
    assert drain(engine)["a", 0].versions.tolist() == [1, 1, 1]
    assert engine.stats()["prefill_tokens"] == 16 + 40


def test_memory_bounds_what_runs(tiny, make_requests, monkeypatch):
    budget = 64 * 16 * PER_TOKEN
    monkeypatch.setattr(memory, "cache_budget", lambda device, share, weights: int(share * budget))
    model = tiny()
    requests = make_requests(30, max_tokens=20)
    runs = {}
    for share in (1.0, 0.25):
        engine = make(model, gpu_memory_utilization=share)
        runs[share] = generate(engine, requests)
        stats = engine.stats()
        assert stats["cache_bytes"] == share * budget
        assert stats["peak_running"] <= share * 64
        assert 0.8 < stats["cache_use"] <= 1
    free = generate(make(model), requests)
    for samples in runs.values():
        assert [s.token_ids.tolist() for s in samples] == [s.token_ids.tolist() for s in free]


def test_the_cache_is_no_larger_than_what_is_asked_for(tiny):
    engine = make(tiny(), max_num_seqs=3)
    short = [Request(f"a{i}", 0, np.array([1 + i]), SamplingParams(max_tokens=20)) for i in range(2)]
    engine.submit(short)
    engine.poll(0.0)
    assert engine._store.cache.blocks == 2 * 2
    long = [Request(f"b{i}", 0, np.arange(1, 60), SamplingParams(max_tokens=9)) for i in range(9)]
    engine.submit(long)  # the first two are still running, and continue in the larger cache
    samples = drain(engine)
    assert engine._store.cache.blocks == 3 * 5
    for request, sample in zip(short, generate(make(tiny()), short), strict=True):
        assert samples[request.id].token_ids.tolist() == sample.token_ids.tolist()


def test_the_use_of_the_cache_does_not_depend_on_what_was_asked_before(tiny):
    asked = [Request(f"a{i}", 0, np.array([1 + i]), SamplingParams(max_tokens=20)) for i in range(2)]
    large = [Request(f"b{i}", 0, np.arange(1, 60), SamplingParams(max_tokens=9)) for i in range(9)]
    found = []
    for before in ([], large):
        engine = make(tiny(), max_num_seqs=3)
        engine.submit(before)
        drain(engine)
        engine.update_weights(SharedModule(tiny()), 1)
        engine.stats()
        engine.submit(asked)
        drain(engine)
        found.append({**engine.stats()})
    assert found[0] == found[1]
    assert found[0]["cache_use"] == 1


def test_cache_too_small_for_one_sequence_says_what_fits(tiny, monkeypatch):
    request = Request("a", 0, np.ones(90, dtype=np.int64), SamplingParams(max_tokens=38))
    monkeypatch.setattr(memory, "cache_budget", lambda device, share, weights: 100 * PER_TOKEN)
    for options, key in (
        ({}, "gpu_memory_utilization"),
        ({"num_gpu_blocks_override": 6}, "num_gpu_blocks_override"),
    ):
        engine = make(tiny(), **options)
        with pytest.raises(EngineError, match=f"(?s){key}.*8 blocks.*96 tokens"):
            engine.submit([request])
    engine = NativeEngine(device=CPU, max_length=128)  # it does not know the model yet
    engine.submit([request])
    engine.update_weights(SharedModule(tiny()), 0)
    with pytest.raises(EngineError, match=r"(?s)gpu_memory_utilization.*8 blocks.*96 tokens"):
        engine.poll(1.0)
    engine.abort([request.id])
    engine.sleep()


def test_a_request_that_no_block_override_can_hold_harms_no_other(tiny):
    """No request of this call is queued, with weights or without."""
    good, bad = (
        Request(name, 0, np.arange(n), SamplingParams(max_tokens=8)) for name, n in (("a", 9), ("b", 90))
    )
    for engine in (
        make(tiny(), num_gpu_blocks_override=2),
        NativeEngine(device=CPU, max_length=128, num_gpu_blocks_override=2),
    ):
        with pytest.raises(EngineError, match="32 tokens"):
            engine.submit([good, bad])
        assert engine.pending() == 0
        engine.submit([good])
        engine.update_weights(SharedModule(tiny()), 0)
        assert set(drain(engine)) == {good.id}


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize(("prompt", "blocks"), [(60, 8), (110, 16)], ids=["stays", "is replaced"])
def test_a_cache_that_cannot_grow_beside_itself(tiny, monkeypatch, prompt, blocks, run_ahead):
    """There is memory for 8 blocks and 8 more, never for 8 and 16.

    A cache that holds the longest sequence stays in use. Otherwise its running sequences are computed again
    in a larger cache.
    """
    block = 16 * PER_TOKEN
    first, *others = (
        Request(name, 0, np.arange(n) % 97, SamplingParams(max_tokens=60, repetition_penalty=1.1))
        for name, n in (("first", 68), ("x", prompt), ("y", prompt + 1))
    )
    alone = [generate(make(tiny(), max_length=256), [request]) for request in (first, *others)]
    monkeypatch.setattr(memory, "cache_budget", lambda device, share, weights: 16 * block)
    engine = make(tiny(), max_length=256, run_ahead=run_ahead)
    monkeypatch.setattr(
        memory, "host_free", lambda: 16 * block - (engine._store.cache.bytes if engine._store.cache else 0)
    )
    engine.submit([first])
    for _ in range(5):
        engine.poll(0.0)
    assert engine._store.cache.blocks == 8
    engine.submit(others)
    samples = drain(engine)
    assert engine._store.cache.blocks == blocks
    for [expected] in alone:
        assert samples[expected.id].token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_what_bad_weights_left_in_the_cache_harms_no_good_ones(tiny, attention):
    """The blocks that a second sequence gets contain NaN beyond its end."""
    bad = tiny()
    with torch.no_grad():
        bad.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    engine = make(bad, num_gpu_blocks_override=4, attention=attention)
    long, short = (
        Request(name, 0, np.arange(1, n), SamplingParams(max_tokens=8)) for name, n in (("l", 50), ("s", 5))
    )
    engine.submit([long])
    with pytest.raises(EngineError, match="not finite"):
        engine.poll(1.0)
    engine.abort([long.id])
    engine.update_weights(SharedModule(tiny()), 1)
    [sample] = generate(engine, [short])
    [alone] = generate(make(tiny(), attention=attention), [short])
    assert sample.token_ids.tolist() == alone.token_ids.tolist()


def test_abort_of_a_running_sequence_keeps_its_tokens(tiny):
    model = tiny(dtype=torch.float64)
    requests = [Request(f"p{i}", 0, np.array([3 + i, 4]), SamplingParams(max_tokens=9)) for i in range(3)]
    whole = generate(make(model), requests)
    for run_ahead in (False, True):
        engine = make(model, run_ahead=run_ahead)
        engine.submit(requests)
        engine.poll(0.0)
        [partial] = engine.abort([requests[0].id], keep_partial=True)
        assert partial.finish_reason == "abort"
        assert partial.token_ids.tolist() == whole[0].token_ids[:1].tolist()
        rest = {id: sample.token_ids.tolist() for id, sample in drain(engine).items()}
        assert rest == {s.id: s.token_ids.tolist() for s in whole[1:]}


def test_abort_loses_nothing_that_has_finished_meanwhile(tiny):
    """The last token is drawn but not accepted yet when the request is aborted."""
    engine = make(tiny(), run_ahead=True)
    request = Request("a", 0, np.array([3, 4]), SamplingParams(max_tokens=1))
    engine.submit([request])
    engine.poll(0.0)
    [sample] = engine.abort([request.id], keep_partial=True)
    assert (len(sample.token_ids), sample.finish_reason) == (1, "length")
    assert engine.pending() == 0 and engine.poll(0.0) == []


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_step_that_failed_is_taken_back(tiny, make_requests, run_ahead):
    """Penalties count tokens on the device. Tokens of the lost step must not stay counted there."""
    model = tiny(dtype=torch.float64)
    requests = make_requests(12, 2, max_tokens=12, repetition_penalty=1.2)
    engine = make(model, run_ahead=run_ahead)
    forward, calls = engine._steps.runner.forward, []

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
    for request, sample in zip(requests, generate(make(model), requests), strict=True):
        assert samples[request.id].token_ids.tolist() == sample.token_ids.tolist()
