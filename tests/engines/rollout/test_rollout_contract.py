from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from tandem.engines.rollout import base
from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.own_weights import OwnWeights
from tandem.errors import EngineError
from tests.contract.rollout import RolloutContract
from tests.contract.world import EngineKind, log_probs
from tests.engines.rollout.case import CPU, native, request, stream, tokens
from tests.support.refusing import refused

NAMES = ("native-fused", "native-module", "hf")


def make_engine(name, model=None, **options):
    options = {"max_length": 96, **options}
    if name != "hf":
        return native(model, runner=name.removeprefix("native-"), **options)
    engine = HFEngine(device=CPU, **options)
    if model is not None:
        engine.update_weights(SharedModule(model), 0)
    return engine


def kind_of(name, own=False):
    def make(world, **options):
        owned = {"own": OwnWeights(world.folder, CPU)} if own else {}
        return make_engine(name, decode=world.decode, **owned, **options)

    return EngineKind(f"{name}-own", make, stream) if own else EngineKind(name, make, SharedModule)


class TestInProcess(RolloutContract):
    @pytest.fixture(
        scope="class",
        params=[*map(kind_of, NAMES), kind_of(NAMES[0], own=True), kind_of("hf", own=True)],
        ids=str,
    )
    @classmethod
    def kind(cls, request):
        return request.param


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_all_engines_agree_in_any_company_up_to_the_rounding_of_float64(tiny, make_requests):
    model, requests, runs = tiny(dtype=torch.float64), make_requests(12, 2, temperature=0.9, top_p=0.9), []
    for name in NAMES:
        for shares in ([requests], [requests[:5], requests[5:]]):
            engine = make_engine(name, model)
            runs.append([sample for share in shares for sample in generate(engine, share)])
    for one, *others in zip(*runs, strict=True):
        for other in others:
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-9, rtol=0)


def test_continued_response_draws_the_same_numbers(name, tiny):
    engine = make_engine(name, tiny(dtype=torch.float64))
    [whole] = tokens(generate(engine, [request(max_tokens=20)]))
    longer = [1, 2, 3, *whole[:8]]
    [rest] = tokens(generate(engine, [request(prompt=longer, max_tokens=12)]))
    assert rest == whole[8:]
    assert tokens(generate(engine, [request(prompt=longer, max_tokens=12, first=500)])) != [rest]


def test_leaves_no_trace_in_the_module(name, tiny, make_requests):
    model = tiny().train()
    model.model.layers[0].eval()
    model.config._attn_implementation = "eager"
    generate(make_engine(name, model), make_requests(3))
    assert model.training and not model.model.layers[0].training
    assert model.config._attn_implementation == "eager"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_positions_of_the_model_bind(name, tiny):
    engine = make_engine(name, max_length=1000)
    engine.submit([request(prompt=2, max_tokens=255)])
    with pytest.raises(EngineError, match="max_position_embeddings = 256"):
        engine.update_weights(SharedModule(tiny()), 0)


def test_stop_strings_need_a_tokenizer(name):
    refused(EngineError, lambda: make_engine(name).submit([request(stop=("x",))]), "tokenizer")


def test_nan_logits_name_the_request(name, tiny):
    model = tiny("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    engine = make_engine(name, model)
    engine.submit([request("good", prompt=2, max_tokens=4), request("bad", 3, [5], max_tokens=4)])
    refused(EngineError, lambda: engine.poll(1.0), r"\('bad', 3\) at response token 0")


def test_generation_config_of_the_checkpoint_is_not_applied(name, tiny, make_requests):
    written = []
    for defaults in ({}, {"repetition_penalty": 3.0, "eos_token_id": list(range(0, 97, 2))}):
        model = tiny()
        model.generation_config = GenerationConfig(**defaults)
        requests = make_requests(4, temperature=0.0, max_tokens=12)
        written.append(tokens(generate(make_engine(name, model), requests)))
        assert model.generation_config.repetition_penalty == defaults.get("repetition_penalty")
    assert written[0] == written[1]


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-7), (torch.float32, 1e-4)])
def test_log_probs_are_as_precise_as_the_model(name, tiny, make_requests, dtype, precision):
    model, requests = tiny(dtype=dtype), make_requests(8, 2, temperature=0.8)
    for asked, sample in zip(requests, generate(make_engine(name, model), requests), strict=True):
        wanted = np.float64 if dtype == torch.float64 else np.float32
        assert sample.log_probs.dtype == sample.untruncated_log_probs.dtype == wanted
        np.testing.assert_allclose(sample.log_probs, log_probs(model, asked, sample), atol=precision)


@pytest.mark.parametrize("name", ["native-module", "hf"])
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2"])
def test_sinks_and_soft_caps_of_attention(name, tiny, make_requests, kind):
    model, requests = tiny(kind), make_requests(8, temperature=0.8)
    samples = generate(make_engine(name, model), requests)
    model.set_attn_implementation("eager")
    for asked, sample in zip(requests, samples, strict=True):
        np.testing.assert_allclose(sample.log_probs, log_probs(model, asked, sample), atol=1e-4)


def test_an_engine_that_stands_still_is_given_up(make_requests, monkeypatch):
    waiting, clock = [], [0.0]

    def poll(timeout_s):
        clock[0] += 1
        return [waiting.pop(0)] if len(waiting) > 2 else []

    def abort(ids):
        waiting[:] = [asked for asked in waiting if asked.id not in ids]

    monkeypatch.setattr(base.time, "monotonic", lambda: clock[0])
    engine = SimpleNamespace(submit=waiting.extend, poll=poll, progress=lambda: 4 - len(waiting), abort=abort)
    parts = base.finished(engine, make_requests(4), at_least=1, stall_timeout_s=10)
    assert [len(next(parts)) for _ in range(2)] == [1, 1]
    clock[0] += 100  # time that the caller takes
    error = refused(EngineError, lambda: next(parts), "no token for 10 s")
    assert clock[0] == 2 + 100 + 11
    assert "2 requests pending, the first is ('p2', 0)" in error.got
    assert waiting == []
