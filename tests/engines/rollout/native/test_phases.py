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
from tandem.engines.rollout.native import steps as native
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.graphs import GraphedRunner
from tandem.errors import EngineError
from tandem.models.parallel import init_distributed
from tandem.protocol import Request, SamplingParams

CPU = torch.device("cpu")
PER_TOKEN = 256  # bytes of tiny qwen2 in float32: 2 layers * 2 heads * (8 + 8) * 4


def make(model, **options):
    engine = NativeEngine(**{"device": CPU, "max_length": 128, **options})
    engine.update_weights(SharedModule(model), 0)
    return engine


def test_sleep_gives_back_what_it_is_told_to(tiny, make_requests):
    engine = make(tiny())
    requests = make_requests(3)
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
    engine.submit(requests)
    with pytest.raises(EngineError, match="update_weights"):
        engine.poll(0.0)


def test_graphs_last_as_long_as_cache_and_weights_stay(tiny, make_requests, monkeypatch):
    """Work that runs again replaces captured graphs."""
    made = []

    def graphed(*args):
        made.append(GraphedRunner(*args, capture=lambda work: work))
        return made[-1]

    monkeypatch.setattr(native, "GraphedRunner", graphed)
    model = tiny(dtype=torch.float64)
    requests = make_requests(20, 2)
    expected = [sample.token_ids.tolist() for sample in generate(make(model), requests)]
    engine = make(model)
    engine._steps.graphs = True
    for phase in range(3):
        engine.update_weights(SharedModule(model), phase)
        for _ in range(2):
            assert [sample.token_ids.tolist() for sample in generate(engine, requests)] == expected
            assert len(made) == phase + 1
        if phase == 1:
            engine.sleep()
    engine.submit([Request("long", 0, np.ones(90, dtype=np.int64), SamplingParams(max_tokens=9))])
    engine.submit(
        [Request(f"x{r.uid}", r.sample, r.prompt_ids, SamplingParams(max_tokens=60)) for r in requests]
    )
    while engine.pending():
        engine.poll(10.0)
    assert len(made) == 4  # because the cache has grown


def test_weights_of_another_model_need_an_idle_engine(tiny, make_requests):
    engine = make(tiny())
    requests = make_requests(3)
    generate(engine, requests)
    engine.submit(requests)
    engine.poll(0.0)
    with pytest.raises(EngineError, match="another model"):
        engine.update_weights(SharedModule(tiny("qwen3")), 1)
    while engine.pending():
        engine.poll(10.0)
    engine.update_weights(SharedModule(tiny("qwen3")), 1)
    expected = generate(make(tiny("qwen3")), requests)
    for sample, other in zip(generate(engine, requests), expected, strict=True):
        assert sample.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize("runner", ["fused", "module"])
def test_module_under_fsdp(tiny, make_requests, runner):
    """Generation inside an unsharded FSDP2 module equals generation of the plain module."""
    requests = make_requests(5, max_tokens=10)
    expected = [s.token_ids.tolist() for s in generate(make(tiny(), runner=runner), requests)]
    model = sharded(tiny())
    written = [s.token_ids.tolist() for s in generate(make(model, runner=runner), requests)]
    assert written == expected


def sharded(model):
    """Return the model under FSDP2, unsharded."""
    mesh = init_distributed(CPU)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    for part in (model, *model.model.layers):
        part.unshard()
    return model


def test_fsdp_takes_no_part_in_a_step_and_is_back_afterwards(tiny, make_requests, monkeypatch):
    """FSDP's hooks make other streams wait for each layer. A captured step must not do this."""
    calls = []
    plain = FSDPParamGroup.pre_forward
    monkeypatch.setattr(
        FSDPParamGroup, "pre_forward", lambda self, *args: calls.append(1) or plain(self, *args)
    )
    model = sharded(tiny())
    hooks = [(list(part._forward_pre_hooks), list(part._forward_hooks)) for part in model.modules()]
    assert sum(len(before) + len(after) for before, after in hooks) == 2 * 3
    generate(make(model, runner="module"), make_requests(3))
    assert not calls
    assert hooks == [(list(part._forward_pre_hooks), list(part._forward_hooks)) for part in model.modules()]
    ids = torch.arange(1, 9)[None]
    other = tiny()
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

    def requests(count, tokens):
        prompts, responses = rng.integers(2, 60, size=count), rng.integers(1, tokens + 1, size=count)
        return [
            Request(f"p{i}", 0, rng.integers(0, 64, size=n), SamplingParams(max_tokens=int(m)))
            for i, (n, m) in enumerate(zip(prompts, responses, strict=True))
        ]

    wanted, other = requests(24, 30), requests(9, 60)
    runs = []
    for before, sleeps in (([], False), (other, True), (other, False)):
        engine = make(model)
        generate(engine, before)
        if sleeps:
            engine.sleep()
        engine.update_weights(SharedModule(model), 0)
        runs.append(generate(engine, wanted))
    for samples in zip(*runs, strict=True):
        for sample in samples[1:]:
            assert np.array_equal(sample.token_ids, samples[0].token_ids)
            assert np.array_equal(sample.log_probs, samples[0].log_probs)
