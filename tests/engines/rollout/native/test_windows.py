"""Engines over models with windows and chunks: the blocks behind them are given back, and nothing changes."""

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.native import memory
from tandem.memory.cache import layer_groups
from tests.engines.rollout.case import drain, native, request
from tests.support.marks import slow_but

BLOCK = 4
MODELS = ["qwen3_window", "mistral_window", "gpt_oss", "llama4", "gemma3_text"]  # windows of 6 to 8 tokens
every_model = pytest.mark.parametrize("name", slow_but(["qwen3_window", "llama4"], MODELS))


def make(model, **options):
    options = {"block_size": BLOCK, "max_length": 400, "runner": "auto", **options}
    return native(model, **options)


def check_log_probs(model, requests, samples):
    """Compare the log-probs with those of one forward of transformers over each whole sequence."""
    for each in requests:
        sample = samples[each.id]
        ids = torch.from_numpy(np.concatenate([each.prompt_ids, sample.token_ids]))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(each.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[len(each.prompt_ids) :, None])[:, 0]
        np.testing.assert_allclose(sample.log_probs, expected.numpy(), rtol=1e-6, atol=1e-9)


def drained(engine):
    samples = drain(engine)
    engine._scheduler.blocks.check()
    assert engine._scheduler.blocks.in_use == 0
    return samples


@every_model
def test_a_long_sequence_holds_few_blocks_of_a_window(name, tiny):
    model, asked = tiny(name, torch.float64), request(prompt=30, max_tokens=270)
    model.config.max_position_embeddings = 400
    engine, held = make(model, max_num_batched_tokens=16), []
    engine.submit([asked])
    blocks = engine._scheduler.blocks
    samples = []
    while not samples:
        samples = engine.poll(0.0)
        held.append([len(part) for part in blocks.of(0)])
    check_log_probs(model, [asked], {asked.id: samples[0]})
    prefill, decode = np.array(held[:1]), np.array(held[2:-1])
    for group, window in enumerate(blocks.groups.windows):
        assert decode[:, group].max() <= (-(-window // BLOCK) + 1 if window else 75)
        assert prefill[:, group].max() <= -(-(window + 16) // BLOCK) + 1
        assert window or decode[-1, group] == 75
    assert any(blocks.groups.windows)
    most = engine._store.blocks  # of a cache that is as large as this sequence can fill
    assert most == blocks.groups.blocks(300, 16, BLOCK) < 75 * len(blocks.groups.windows)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "options"), [
    ("qwen3_window", {}), slow("qwen3_window", {"run_ahead": True, "max_num_batched_tokens": 7}),
    ("mixtral", {}), slow("qwen2_moe", {"run_ahead": True}), slow("olmoe", {}),
    slow("qwen3_moe", {"max_num_batched_tokens": 7}),
    slow("llama4", {"max_num_batched_tokens": 7}), slow("gpt_oss", {"run_ahead": True}),
    slow("gemma3_text", {"enable_chunked_prefill": False}),
    slow("mistral_window", {"enable_prefix_caching": False}),
], ids=str)  # fmt: skip
def test_samples_prefixes_preemptions_and_aborts(name, options, tiny, make_requests):
    model = tiny(name, torch.float64)
    requests = [each for each in make_requests(24, 3, temperature=1.0) if len(each.prompt_ids) > 1]
    engine = make(model, max_num_seqs=12, num_gpu_blocks_override=20, max_length=80, **options)
    engine.submit(requests)
    finished, gone = {}, [each.id for each in requests[10:30:4]]
    for _ in range(8):
        finished |= {sample.id: sample for sample in engine.poll(0.0)}
        engine._scheduler.blocks.check()
    gone = [id for id in gone if id not in finished]
    partial = {sample.id: sample for sample in engine.abort(gone, keep_partial=True)}
    samples = finished | partial | drained(engine)
    assert engine.stats()["preemptions"] > 0 or name in (
        "mistral_window",
        "mixtral",
    )  # whose sequences stay small
    check_log_probs(model, requests, samples)
    # The aborted ones go on, and the next turns begin with what was written before.
    follow = [
        request(
            f"next {each.uid}", each.id[1], [*each.prompt_ids, *samples[each.id].token_ids, 5], max_tokens=9
        )
        for each in requests[:30]
    ]
    engine.submit(follow)
    samples = drained(engine)
    check_log_probs(model, follow, samples)


@pytest.mark.parametrize("options", slow_but([{}], [{}, {"enable_chunked_prefill": False}]), ids=str)
def test_the_smallest_cache_that_is_accepted_is_enough(options, tiny, monkeypatch):
    """Preempted sequences are computed again, which takes more tokens at once than their prompts have."""
    model = tiny("qwen3_window", torch.float64)
    requests = [request(str(i), prompt=[i, 7, 9], max_tokens=57) for i in range(4)]
    engine = make(model, **options)
    blocks, per_block = engine._blocks([(3, 60)])[0], engine._store.per_block(engine._steps.runner)
    monkeypatch.setattr(memory, "cache_budget", lambda *_: blocks * per_block)
    engine.submit(requests)
    samples = drained(engine)
    assert engine._store.blocks == blocks == (15 + 4 if not options else 30)
    assert engine.stats()["preemptions"] > 0
    check_log_probs(model, requests, samples)


@every_model
def test_the_next_turn_needs_only_the_blocks_of_the_window(name, tiny):
    model = tiny(name, torch.float64)
    engine = make(model, num_gpu_blocks_override=30)
    first = request("a", prompt=40, max_tokens=30, temperature=0.0)
    [answer] = generate(engine, [first])
    second = request("b", prompt=[*range(1, 41), *answer.token_ids, 1, 2, 3], max_tokens=5)
    samples = generate(engine, [second])
    assert engine.stats()["cached_prefix_tokens"] == 68  # of 69 that are in the cache
    check_log_probs(model, [second], {second.id: samples[0]})
    # A shorter prefix is found too, unless the blocks of its window are needed for something else.
    generate(engine, [request("c", prompt=np.arange(100, 160) % 97, max_tokens=55)])
    third = request("d", prompt=[*range(1, 21), 9, 9], max_tokens=5)
    check_log_probs(model, [third], {third.id: generate(engine, [third])[0]})


@pytest.mark.parametrize(("windows", "groups", "size"), [
    ([0] * 5, [0], 5), ([9] * 5, [9], 5), ([9, 0] * 3, [9, 0], 3), (([9] * 5 + [0]) * 4, [9] * 5 + [0], 4),
    ([0, 9, 0, 7, 0, 0], [0, 0, 0, 0, 9, 7], 1), ([0] + [9] * 39, [0] + [9] * 8, 5),
])  # fmt: skip
def test_groups(windows, groups, size):
    made = layer_groups(windows)
    assert (list(made.windows), made.size) == (groups, size)
    assert [made.windows[group] for group, _ in made.places] == windows
    assert len(set(made.places)) == len(windows) and max(place for _, place in made.places) == size - 1
