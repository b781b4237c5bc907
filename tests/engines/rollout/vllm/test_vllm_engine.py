"""Tests on a real vLLM. See `make test-vllm`."""

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.vllm.memory import caches
from tandem.engines.weight_sync import Sent, WeightSyncError, check_arrival, digest
from tandem.errors import EngineError
from tests.contract.rollout import RolloutContract
from tests.contract.world import VOCABULARY, EngineKind
from tests.engines.rollout.case import CPU, drain, request, stream, tokens
from tests.engines.rollout.vllm.models import build, check_samples, make_requests, save
from tests.support.refusing import refused

pytestmark = pytest.mark.vllm
vllm_engine = pytest.importorskip("tandem.engines.rollout.vllm.engine", exc_type=ImportError)


def make(folder, config, **options):
    options = {"max_length": 96, **options}
    return vllm_engine.VLLMEngine(model_path=str(folder), config=config, device=CPU, **options)


class TestVLLM(RolloutContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls):
        def make_one(world, **options):
            return make(world.folder, world.module.config, decode=world.decode, **options)

        options = {"keyed": False, "recomputes": True, "untruncated": False, "modes": ("raw_logprobs",)}
        return EngineKind("vllm", make_one, stream, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Yield an engine. The weights in its folder are not those of `build()`."""
    folder, config = save(build(seed=9), tmp_path_factory.mktemp("model")), build().config
    rng_before = torch.get_rng_state()
    engine = make(folder, config, max_length=256, max_num_seqs=8)
    assert torch.equal(torch.get_rng_state(), rng_before)
    refused(EngineError, lambda: generate(engine, make_requests(1)), "no weights")
    assert engine.pending() == 0
    yield engine
    engine.close()


@pytest.fixture
def model():
    return build()


@pytest.fixture
def engine(made, model):
    made.abort([writing.request.id for writing in made._writing.values()])
    assert made.update_weights(stream(model), 0) == digest(model.named_parameters())
    made.stats()
    return made


def test_cached_prefixes_are_of_the_weights(engine):
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, size=200)  # vLLM's blocks here have 128 tokens
    requests = [request("a", i, prompt, max_tokens=5) for i in range(4)]
    generate(engine, requests)
    generate(engine, requests)
    stats = engine.stats()
    assert stats["cached_prefix_tokens"] >= 4 * 128
    assert stats["prefill_tokens"] + stats["cached_prefix_tokens"] == 8 * 200
    engine.update_weights(stream(build(seed=5)), 1)
    check_samples(build(seed=5), requests, generate(engine, requests))


K_PROJ, V_PROJ = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv")


@pytest.mark.parametrize(("name", "other", "what"), [
    ("model.embed_tokens.weight", "damaged", "is damaged"), (K_PROJ, V_PROJ, f"the weight {V_PROJ}"),
    ("model.layers.0.self_attn.v_proj.bias", "damaged", "is damaged"),
    ("model.layers.1.mlp.up_proj.weight", "stale", "is still that of version 0"),
])  # fmt: skip
def test_weights_that_did_not_arrive_are_named(engine, model, name, other, what):
    new = build(seed=5)
    old, sent = dict(model.named_parameters()), dict(new.named_parameters())

    def wrong(at, tensor):
        if at == other:
            return sent[name].detach().clone()
        if at == name and other == "damaged":
            tensor.view(-1)[11] += 1e-5
        elif at == name:
            return (old[name] if other == "stale" else sent[other]).detach().clone()
        return tensor

    held = engine.update_weights(stream(new, wrong), 1)
    before, after = (Sent(v, digest(each.named_parameters())) for v, each in enumerate((model, new)))
    error = refused(WeightSyncError, lambda: check_arrival(after, held, engine="vllm", before=before))
    assert f"{name} " in error.got and what in error.got
    assert error.message.startswith("2 of" if other == V_PROJ else "1 of")


def test_wrong_weights_are_refused_and_leave_an_engine_without(engine, model):
    skipping = stream(model, lambda at, tensor: None if at == K_PROJ else tensor)
    assert refused(EngineError, lambda: engine.update_weights(skipping, 1), "incomplete").field == K_PROJ
    refused(EngineError, lambda: generate(engine, make_requests(1)), "no weights")
    refused(EngineError, lambda: engine.update_weights(stream(build("qwen3")), 1), "another model")
    double = stream(build().to(torch.float64))
    error = refused(EngineError, lambda: engine.update_weights(double, 1), "another dtype")
    assert (error.got, error.expected) == (torch.float64, torch.float32)
    engine.update_weights(stream(model), 2)
    generate(engine, make_requests(1))


def test_sleep_gives_memory_back(engine, model):
    requests = make_requests(3)
    before = tokens(generate(engine, requests))

    def held():
        parts = engine._model.parameters(), caches(engine._engine)
        return tuple(sum(part.untyped_storage().nbytes() for part in each) for each in parts)

    weights, cache = held()
    engine.sleep(("kv_cache",))
    assert held() == (weights, 0)
    assert tokens(generate(engine, requests)) == before
    engine.sleep()
    engine.sleep()
    assert held() == (0, 0)
    engine.wake(("weights",))
    assert held() == (weights, 0)
    engine.submit(requests)
    refused(EngineError, lambda: engine.poll(0.0), "no weights")
    engine.update_weights(stream(model), 3)
    done = drain(engine)
    assert held() == (weights, cache)
    assert tokens(done[each.id] for each in requests) == before


@pytest.mark.parametrize("temperature", [2.5, 0.001])
def test_temperatures_that_vllm_would_refuse_or_change(engine, temperature):
    with pytest.raises(EngineError, match="cannot sample") as caught:
        engine.submit([*make_requests(1), *make_requests(1, 2, temperature=temperature)[1:]])
    assert caught.value.field == "temperature"
    assert engine.pending() == 0


def test_logits_that_are_not_finite_name_the_request(engine, model):
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
        model.model.layers[0].self_attn.v_proj.bias[0] = torch.nan
    engine.update_weights(stream(model), 1)
    engine.submit([request("bad", 3, [5], max_tokens=4)])
    refused(EngineError, lambda: engine.poll(1.0), r"\('bad', 3\) at response token 0")


def test_what_vllm_raises_becomes_an_engine_error(engine, monkeypatch):
    engine.submit(make_requests(1))
    monkeypatch.setattr(engine._engine, "step", lambda: 1 / 0)
    error = refused(EngineError, lambda: engine.poll(1.0), "vLLM failed in a step")
    assert error.got == "ZeroDivisionError: division by zero"


def test_a_folder_without_a_model_is_refused(tmp_path):
    refused(EngineError, lambda: make(tmp_path, build().config), "vLLM cannot run the model")


def test_a_process_group_that_is_gone_or_another_s_does_not_stop_a_close(tmp_path):
    made_first = torch.distributed.is_initialized()
    engine = make(save(build(), tmp_path), build().config)
    assert torch.distributed.is_initialized()
    if not made_first:
        torch.distributed.destroy_process_group()
    engine.close()
    engine.close()
    assert torch.distributed.is_initialized() == made_first
