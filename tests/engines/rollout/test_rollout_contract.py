"""Tests of the engines of this process: native with either runner, and hf.

They run the engine contract over the trainer's module and over the engines' own weights. They also test what
these engines do because they share the trainer's module.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from tandem.engines.rollout.base import SharedModule, WeightStream, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.own_weights import OwnWeights
from tandem.errors import EngineError
from tandem.protocol import Request, SamplingParams

pytest.register_assert_rewrite("tests.contract.rollout")
from tests.contract.rollout import RolloutContract  # noqa: E402
from tests.contract.world import EngineKind  # noqa: E402

CPU = torch.device("cpu")
NAMES = ("native-fused", "native-module", "hf")


def decode(token_ids):
    return "".join(chr(0x100 + token) for token in token_ids)


def make_engine(name, **options):
    options = {"device": CPU, "max_length": 96, "decode": decode, **options}
    if name == "hf":
        return HFEngine(**options)
    return NativeEngine(runner=name.removeprefix("native-"), **options)


def kind_of(name, own=False):
    def make(world, **options):
        if own:
            options["own"] = OwnWeights(world.folder, CPU)
        return make_engine(name, decode=world.decode, **options)

    if own:
        return EngineKind(f"{name}-own", make, lambda module: WeightStream(module.named_parameters()))
    return EngineKind(name, make, SharedModule)


class TestInProcess(RolloutContract):
    @pytest.fixture(
        scope="class",
        params=[*map(kind_of, NAMES), kind_of("native-fused", own=True), kind_of("hf", own=True)],
        ids=str,
    )
    @classmethod
    def kind(cls, request):
        return request.param


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def reference_log_probs(model, request, sample, temperature=1.0):
    """Compute the log-probs of the sample's tokens by one full forward."""
    ids = torch.from_numpy(np.concatenate((request.prompt_ids, sample.token_ids)))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, torch.from_numpy(sample.token_ids)[:, None])[:, 0].numpy()


def test_greedy_equals_plain_generate(name, tiny, make_requests):
    model = tiny(dtype=torch.float64)
    requests = make_requests(temperature=0.0)
    engine = make_engine(name)
    engine.update_weights(SharedModule(model), 0)
    for request, sample in zip(requests, generate(engine, requests), strict=True):
        expected = model.generate(
            torch.from_numpy(request.prompt_ids)[None],
            attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=request.params.max_tokens,
            pad_token_id=0,
            eos_token_id=None,
        )[0, len(request.prompt_ids) :]
        assert sample.token_ids.tolist() == expected.tolist()
        assert sample.finish_reason == "length"


def test_samples_of_all_engines_agree(tiny, make_requests):
    model = tiny(dtype=torch.float64)
    requests = make_requests(10, 2, temperature=0.9, top_p=0.9)
    written = []
    for name in NAMES:
        engine = make_engine(name)
        engine.update_weights(SharedModule(model), 0)
        written.append([sample.token_ids.tolist() for sample in generate(engine, requests)])
    assert written[0] == written[1] == written[2]


def test_continued_response_draws_the_same_numbers(name, tiny, make_requests):
    """A response that is cut in two and continued as a longer prompt equals the uncut response."""
    model = tiny(dtype=torch.float64)
    [request] = make_requests(1, max_tokens=20)
    engine = make_engine(name)
    engine.update_weights(SharedModule(model), 0)
    [whole] = generate(engine, [request])
    longer = np.concatenate((request.prompt_ids, whole.token_ids[:8]))
    [rest] = generate(engine, [Request(request.uid, 0, longer, SamplingParams(max_tokens=12))])
    assert rest.token_ids.tolist() == whole.token_ids[8:].tolist()
    shifted = Request(request.uid, 0, longer, SamplingParams(max_tokens=12), first_position=500)
    [other] = generate(engine, [shifted])
    assert other.token_ids.tolist() != rest.token_ids.tolist()


def test_leaves_no_trace_in_the_module(name, tiny, make_requests):
    model = tiny().train()
    model.model.layers[0].eval()
    model.config._attn_implementation = "eager"
    engine = make_engine(name)
    engine.update_weights(SharedModule(model), 0)
    generate(engine, make_requests(3))
    assert model.training
    assert not model.model.layers[0].training
    assert model.config._attn_implementation == "eager"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_sleep_needs_an_idle_engine_and_drops_weights(name, tiny, make_requests):
    engine = make_engine(name)
    engine.update_weights(SharedModule(tiny()), 0)
    requests = make_requests(2)
    engine.submit(requests)
    with pytest.raises(EngineError, match="pending"):
        engine.sleep()
    while engine.pending():
        engine.poll(10.0)
    engine.sleep()
    engine.submit(requests)
    with pytest.raises(EngineError, match="update_weights"):
        engine.poll(0.0)


def test_positions_of_the_model_bind(name, tiny):
    engine = make_engine(name, max_length=1000)
    engine.submit([Request("a", 0, np.array([1, 2]), SamplingParams(max_tokens=255))])
    with pytest.raises(EngineError, match="max_position_embeddings = 256"):
        engine.update_weights(SharedModule(tiny()), 0)


def test_stop_strings_need_a_tokenizer(name, tiny):
    engine = make_engine(name, decode=None)
    with pytest.raises(EngineError, match="tokenizer"):
        engine.submit([Request("a", 0, np.array([1]), SamplingParams(stop=("x",)))])


def test_nan_logits_name_the_request(name, tiny):
    model = tiny("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    engine = make_engine(name)
    engine.update_weights(SharedModule(model), 0)
    params = SamplingParams(temperature=0.7, max_tokens=4)
    engine.submit([Request("good", 0, np.array([1, 2]), params), Request("bad", 3, np.array([5]), params)])
    with pytest.raises(EngineError, match=r"\('bad', 3\) at response token 0"):
        engine.poll(1.0)


def test_generation_config_of_the_checkpoint_is_not_applied(name, tiny, make_requests):
    requests = make_requests(4, temperature=0.0, max_tokens=12)
    written = []
    for defaults in ({}, {"repetition_penalty": 3.0, "eos_token_id": list(range(0, 97, 2))}):
        model = tiny()
        model.generation_config = GenerationConfig(**defaults)
        engine = make_engine(name)
        engine.update_weights(SharedModule(model), 0)
        written.append([sample.token_ids.tolist() for sample in generate(engine, requests)])
        assert model.generation_config.repetition_penalty == defaults.get("repetition_penalty")
    assert written[0] == written[1]


def test_log_lines(name, tiny, make_requests, monkeypatch):
    clock = iter(range(0, 10_000, 1))
    monkeypatch.setattr("tandem.engines.rollout.counters.time.monotonic", lambda: next(clock))
    lines = []
    engine = make_engine(name, log=lines.append, max_num_seqs=4)
    engine.update_weights(SharedModule(tiny()), 0)
    generate(engine, make_requests(12, max_tokens=6))
    assert lines
    assert "running" in lines[0]
    assert "tokens/s" in lines[0]


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_log_probs_are_as_precise_as_the_model(name, tiny, make_requests, dtype, precision):
    model = tiny(dtype=dtype)
    requests = make_requests(8, 2, temperature=0.8)
    engine = make_engine(name)
    engine.update_weights(SharedModule(model), 0)
    for request, sample in zip(requests, generate(engine, requests), strict=True):
        wanted = np.float64 if dtype == torch.float64 else np.float32
        assert sample.log_probs.dtype == sample.untruncated_log_probs.dtype == wanted
        # transformers' norms round to float32 for every model dtype, in both forwards
        np.testing.assert_allclose(
            sample.log_probs, reference_log_probs(model, request, sample, 0.8), atol=max(precision, 1e-7)
        )


def test_the_company_changes_float64_log_probs_by_rounding_only(name, tiny, make_requests):
    """As on ranks that divide the prompts among themselves."""
    model = tiny(dtype=torch.float64)
    requests = make_requests(12, 2, temperature=1.0)
    runs = []
    for shares in ([requests], [requests[:5], requests[5:]]):
        engine = make_engine(name)
        engine.update_weights(SharedModule(model), 0)
        runs.append([sample for share in shares for sample in generate(engine, share)])
    for alone, apart in zip(*runs, strict=True):
        assert alone.token_ids.tolist() == apart.token_ids.tolist()
        np.testing.assert_allclose(alone.log_probs, apart.log_probs, atol=1e-9, rtol=0)
