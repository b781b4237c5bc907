import gc
import weakref

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import Qwen2Config, Qwen2ForCausalLM

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native import memory
from tandem.errors import EngineError
from tandem.models.parallel import init_distributed
from tests.engines.rollout.case import CPU, PER_TOKEN, native, request, tokens
from tests.engines.rollout.case import drain as drain_only
from tests.support.refusing import refused

either_order = pytest.mark.parametrize("run_ahead", [False, True])


def drain(engine):
    samples = drain_only(engine)
    engine._scheduler.blocks.check()
    assert engine._scheduler.blocks.in_use == 0
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


@pytest.mark.parametrize(("options", "samples", "prefilled"), [
    ({"max_num_seqs": 2}, 4, 80), ({"max_num_batched_tokens": 16}, 1, 16 + 40),
], ids=["samples wait", "half computed"])  # fmt: skip
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
        assert stats["cache_bytes"] == share * budget and stats["peak_running"] <= share * 64
        assert 0.8 < stats["cache_use"] <= 1


FEW = [request(f"a{i}", prompt=[1 + i], max_tokens=20) for i in range(2)]
LARGE = [request(f"b{i}", prompt=59, max_tokens=9) for i in range(9)]


def test_the_cache_is_no_larger_than_what_is_asked_for(tiny):
    engine = native(tiny(), max_num_seqs=3)
    engine.submit(FEW)
    engine.poll(0.0)
    assert engine._store.cache.blocks == 2 * 2
    engine.submit(LARGE)  # the first two are still running, and continue in the larger cache
    samples = drain(engine)
    assert engine._store.cache.blocks == 3 * 5
    assert tokens(samples[each.id] for each in FEW) == tokens(generate(native(tiny()), FEW))


def test_the_use_of_the_cache_does_not_depend_on_what_was_asked_before(tiny):
    found = []
    for before in ([], LARGE):
        engine = native(tiny(), max_num_seqs=3)
        written_by(engine, before)
        engine.update_weights(SharedModule(tiny()), 1)
        engine.stats()
        written_by(engine, FEW)
        found.append(engine.stats())
    assert found[0] == found[1] and found[0]["cache_use"] == 1


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
    refused(EngineError, lambda: engine.poll(1.0), r"(?s)gpu_memory_utilization.*8 blocks.*96 tokens")
    engine.abort([asked.id])
    engine.sleep()


def test_a_request_that_no_block_override_can_hold_harms_no_other(tiny):
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
    engine, asked = native(tiny(), run_ahead=True), request(max_tokens=1)
    engine.submit([asked])
    engine.poll(0.0)  # the last token is drawn but not accepted yet
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


@pytest.mark.parametrize("tag", ["kv_cache", "weights"])
def test_sleep_gives_back_what_it_is_told_to(tiny, make_requests, tag):
    engine = native(tiny())
    generate(engine, make_requests(3))
    cache, runner = weakref.ref(engine._store.cache), weakref.ref(engine._steps.runner)
    engine.sleep([tag])
    gc.collect()
    assert (cache() is None, runner() is None) == (tag == "kv_cache", tag == "weights")
    assert tag == "kv_cache" or engine._source is None


def test_weights_of_another_model_need_an_idle_engine(tiny, make_requests):
    engine, requests = native(tiny()), make_requests(3)
    generate(engine, requests)
    engine.submit(requests)
    engine.poll(0.0)
    refused(EngineError, lambda: engine.update_weights(SharedModule(tiny("qwen3")), 1), "another model")
    drain(engine)
    engine.update_weights(SharedModule(tiny("qwen3")), 1)
    assert tokens(generate(engine, requests)) == tokens(generate(native(tiny("qwen3")), requests))


def sharded(model):
    """Return the model under FSDP2, unsharded."""
    mesh = init_distributed(CPU)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    for part in (model, *model.model.layers):
        part.unshard()
    return model


def test_the_fused_runner_under_fsdp(tiny, make_requests):
    runs = [tokens(generate(native(model), make_requests(5))) for model in (tiny(), sharded(tiny()))]
    assert runs[0] == runs[1]


def hooks_of(model):
    return [(list(part._forward_pre_hooks), list(part._forward_hooks)) for part in model.modules()]


def test_fsdp_takes_no_part_in_a_step_and_is_back_afterwards(tiny, make_requests, monkeypatch):
    """FSDP's hooks make other streams wait for each layer. A captured step must not do this."""
    calls, plain = [], FSDPParamGroup.pre_forward
    monkeypatch.setattr(FSDPParamGroup, "pre_forward", lambda *args: calls.append(1) or plain(*args))
    model, other = sharded(tiny()), tiny()
    hooks = hooks_of(model)
    assert sum(len(before) + len(after) for before, after in hooks) == 2 * 3
    runs = [generate(native(each, runner="module"), make_requests(5)) for each in (model, other)]
    assert tokens(runs[0]) == tokens(runs[1]) and not calls
    assert hooks == hooks_of(model)
    ids = torch.arange(1, 9)[None]
    for each in (model, other):
        each(input_ids=ids, labels=ids).loss.backward()
    assert len(calls) == 3
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


def test_a_phase_is_the_same_whatever_ran_before_it():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=2)).eval()
    rng = np.random.default_rng(0)

    def requests(count, most):
        prompts, responses = rng.integers(2, 60, size=count), rng.integers(1, most + 1, size=count)
        sizes = enumerate(zip(prompts, responses, strict=True))
        return [request(f"p{i}", 0, rng.integers(0, 64, size=n), max_tokens=int(m)) for i, (n, m) in sizes]

    wanted, other, runs = requests(24, 30), requests(9, 60), []
    for before, sleeps in (([], False), (other, True), (other, False)):
        engine = native(model)
        generate(engine, before)
        if sleeps:
            engine.sleep()
        engine.update_weights(SharedModule(model), 0)
        runs.append(generate(engine, wanted))
    for first, *others in zip(*runs, strict=True):
        for sample in others:
            assert np.array_equal(sample.token_ids, first.token_ids)
            assert np.array_equal(sample.log_probs, first.log_probs)
