"""Tests of the native engine between phases: sleep, new weights, another model, the module under FSDP."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import Qwen2Config, Qwen2ForCausalLM

from tandem.engines.rollout.base import SharedModule, generate
from tandem.errors import EngineError
from tandem.models.parallel import init_distributed
from tests.engines.rollout.case import CPU, drain, native, request, tokens


def test_sleep_gives_back_what_it_is_told_to(tiny, make_requests):
    engine, requests = native(tiny()), make_requests(3)
    generate(engine, requests)
    cache = weakref.ref(engine._store.cache)
    engine.sleep(["kv_cache"])
    gc.collect()
    assert cache() is None
    generate(engine, requests)
    cache, runner = weakref.ref(engine._store.cache), weakref.ref(engine._steps.runner)
    engine.sleep(["weights"])
    gc.collect()
    assert cache() is not None and runner() is None and engine._source is None


def test_weights_of_another_model_need_an_idle_engine(tiny, make_requests):
    engine, requests = native(tiny()), make_requests(3)
    generate(engine, requests)
    engine.submit(requests)
    engine.poll(0.0)
    with pytest.raises(EngineError, match="another model"):
        engine.update_weights(SharedModule(tiny("qwen3")), 1)
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


@pytest.mark.parametrize("runner", ["fused", "module"])
def test_module_under_fsdp(tiny, make_requests, runner):
    requests = make_requests(5, max_tokens=10)
    runs = [tokens(generate(native(model, runner=runner), requests)) for model in (tiny(), sharded(tiny()))]
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
    generate(native(model, runner="module"), make_requests(3))
    assert not calls
    assert hooks == hooks_of(model)
    ids = torch.arange(1, 9)[None]
    for each in (model, other):
        each(input_ids=ids, labels=ids).loss.backward()
    assert len(calls) == 3
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


def test_a_phase_is_the_same_whatever_ran_before_it():
    """The results are bitwise equal, with and without a cache that was freed in between."""
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
