"""One suite for every rollout engine: native with either runner, and hf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from tandem.engines.rollout.base import RolloutEngine, SharedModule, finished, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.errors import EngineError
from tandem.protocol import Request, SamplingParams

CPU = torch.device("cpu")


def decode(token_ids):
    return "".join(chr(0x100 + token) for token in token_ids)


def make_engine(name, **options):
    options = {"device": CPU, "max_length": 96, "decode": decode, **options}
    if name == "hf":
        return HFEngine(**options)
    return NativeEngine(runner=name.removeprefix("native-"), **options)


@pytest.fixture(params=["native-fused", "native-module", "hf"])
def name(request):
    return request.param


def reference_log_probs(model, request, sample, temperature=1.0):
    """Of the sample's tokens, by one full forward."""
    ids = torch.from_numpy(np.concatenate((request.prompt_ids, sample.token_ids)))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, torch.from_numpy(sample.token_ids)[:, None])[:, 0].numpy()


def test_is_an_engine(name):
    assert isinstance(make_engine(name), RolloutEngine)


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


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_full_forward(name, tiny, make_requests, temperature):
    model = tiny("qwen3")
    requests = make_requests(20, 2, temperature=temperature)
    engine = make_engine(name)
    engine.update_weights(SharedModule(model), 7)
    for request, sample in zip(requests, generate(engine, requests), strict=True):
        expected = reference_log_probs(model, request, sample, temperature)
        np.testing.assert_allclose(sample.log_probs, expected, atol=1e-4)
        np.testing.assert_array_equal(sample.untruncated_log_probs, sample.log_probs)
        assert len(sample.token_ids) == request.params.max_tokens
        assert sample.versions.tolist() == [7] * len(sample.token_ids)
        assert sample.id == request.id


def test_greedy_log_probs_are_untempered(name, tiny, make_requests):
    model = tiny()
    requests = make_requests(5, temperature=0.0)
    engine = make_engine(name)
    engine.update_weights(SharedModule(model), 0)
    for request, sample in zip(requests, generate(engine, requests), strict=True):
        np.testing.assert_allclose(sample.log_probs, reference_log_probs(model, request, sample), atol=1e-4)


def test_truncated_log_probs(name, tiny, make_requests):
    model = tiny()
    requests = make_requests(10, 2, temperature=0.8, top_k=5)
    engine = make_engine(name)
    engine.update_weights(SharedModule(model), 0)
    for request, sample in zip(requests, generate(engine, requests), strict=True):
        ids = torch.from_numpy(np.concatenate((request.prompt_ids, sample.token_ids)))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double() / 0.8
        kept, tokens = logits.topk(5)
        chosen = tokens == torch.from_numpy(sample.token_ids)[:, None]
        assert chosen.any(1).all()
        np.testing.assert_allclose(sample.log_probs, kept.log_softmax(-1)[chosen].numpy(), atol=1e-4)
        expected = reference_log_probs(model, request, sample, 0.8)
        np.testing.assert_allclose(sample.untruncated_log_probs, expected, atol=1e-4)


def test_randomness_is_keyed(name, tiny, make_requests):
    """Neither the number of sequences that run together nor their order changes a sample; seed, uid and
    sample index do."""
    model = tiny(dtype=torch.float64)
    requests = make_requests(12, 3, temperature=1.0, max_tokens=12)
    runs = []
    for max_num_seqs, order in ((64, requests), (2, requests[::-1])):
        engine = make_engine(name, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
        engine.update_weights(SharedModule(model), 0)
        runs.append({sample.id: sample.token_ids.tolist() for sample in generate(engine, order)})
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0].values()}) == len(requests)


def test_samples_of_all_engines_agree(tiny, make_requests):
    model = tiny(dtype=torch.float64)
    requests = make_requests(10, 2, temperature=0.9, top_p=0.9)
    written = []
    for name in ("native-fused", "native-module", "hf"):
        engine = make_engine(name)
        engine.update_weights(SharedModule(model), 0)
        written.append([sample.token_ids.tolist() for sample in generate(engine, requests)])
    assert written[0] == written[1] == written[2]


def test_continued_response_draws_the_same_numbers(name, tiny, make_requests):
    """A response cut in two and continued as a longer prompt is the uncut response."""
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


def test_stop_token_ends_and_is_kept(name, tiny, make_requests):
    model = tiny()
    engine = make_engine(name)
    engine.update_weights(SharedModule(model), 0)
    requests = make_requests(10, max_tokens=20)
    full = generate(engine, requests)
    stops = [sample.token_ids[6].item() for sample in full]
    cut = [
        Request(r.uid, r.sample, r.prompt_ids, SamplingParams(max_tokens=20, stop_token_ids=(96, stop)))
        for r, stop in zip(requests, stops, strict=True)
    ]
    for before, after, stop in zip(full, generate(engine, cut), stops, strict=True):
        first = next(i for i, token in enumerate(before.token_ids) if token in (96, stop))
        assert after.token_ids.tolist() == before.token_ids[: first + 1].tolist()
        assert after.finish_reason == "stop"
        np.testing.assert_allclose(after.log_probs, before.log_probs[: first + 1], atol=1e-5)


def test_stop_string_across_tokens(name, tiny, make_requests):
    model = tiny()
    engine = make_engine(name)
    engine.update_weights(SharedModule(model), 0)
    [request] = make_requests(1, max_tokens=25)
    [full] = generate(engine, [request])
    text = decode(full.token_ids[10:13])
    params = SamplingParams(max_tokens=25, stop=("never", text))
    [cut] = generate(engine, [Request(request.uid, 0, request.prompt_ids, params)])
    assert cut.token_ids.tolist() == full.token_ids[:13].tolist()
    assert cut.finish_reason == "stop"


def test_poll_returns_each_sample_once(name, tiny, make_requests):
    engine = make_engine(name, max_num_seqs=3)
    engine.update_weights(SharedModule(tiny()), 0)
    requests = make_requests(8, 2)
    engine.submit(requests)
    assert engine.pending() == 16
    seen = []
    while engine.pending():
        seen += [sample.id for sample in engine.poll(0.0)]
    assert sorted(seen) == sorted(request.id for request in requests)
    assert engine.poll(0.0) == []


def test_abort_before_and_after_running(name, tiny, make_requests):
    engine = make_engine(name, max_num_seqs=2)
    engine.update_weights(SharedModule(tiny()), 0)
    requests = make_requests(6, max_tokens=8)
    engine.submit(requests)
    partial = engine.abort([requests[1].id], keep_partial=True)
    assert [(s.id, len(s.token_ids), s.finish_reason) for s in partial] == [(requests[1].id, 0, "abort")]
    engine.poll(0.0)
    engine.abort([requests[4].id, ("unknown", 0)])
    left = []
    while engine.pending():
        left += [sample.id for sample in engine.poll(10.0)]
    assert not {requests[1].id, requests[4].id} & set(left)
    engine.submit([requests[1]])
    assert engine.pending() == 1


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


def test_new_weights_are_used(name, tiny, make_requests):
    model = tiny()
    requests = make_requests(4, temperature=0.0, max_tokens=10)
    engine = make_engine(name)
    for version in range(2):
        engine.update_weights(SharedModule(model), version)
        for request, sample in zip(requests, generate(engine, requests), strict=True):
            np.testing.assert_allclose(
                sample.log_probs, reference_log_probs(model, request, sample), atol=1e-4
            )
            assert set(sample.versions.tolist()) == {version}
        engine.sleep()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))


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


def test_stats_count_and_start_anew(name, tiny, make_requests):
    engine = make_engine(name)
    engine.update_weights(SharedModule(tiny()), 0)
    requests = make_requests(6, max_tokens=5)
    generate(engine, requests)
    stats = engine.stats()
    assert stats["generated_tokens"] == 30
    assert stats["prefill_tokens"] == sum(len(request.prompt_ids) for request in requests)
    assert stats["decode_steps"] == 4
    assert stats["peak_running"] == 6
    assert stats["preemptions"] == 0
    assert (stats["cache_bytes"] > 0) == (name != "hf")
    assert not any(engine.stats().values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": np.ones(90, dtype=np.int64)}, "90 \\+ 8 = 98 tokens"),
        ({"prompt_ids": np.zeros(0, dtype=np.int64)}, "empty prompt"),
        ({"prompt_ids": np.array([3, 97])}, "97"),
        ({"sample": 0}, "already there"),
    ],
)
def test_bad_requests_are_refused_whole(name, tiny, change, message):
    engine = make_engine(name)
    engine.update_weights(SharedModule(tiny()), 0)
    good = {"uid": "a", "sample": 0, "prompt_ids": np.array([1, 2]), "params": SamplingParams(max_tokens=8)}
    with pytest.raises(EngineError, match=message):
        engine.submit([Request(**good), Request(**{**good, "sample": 1, **change})])
    assert engine.pending() == 0


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
        # transformers' norms round to float32 whatever the model's type, both here and there
        np.testing.assert_allclose(
            sample.log_probs, reference_log_probs(model, request, sample, 0.8), atol=max(precision, 1e-7)
        )


def test_the_company_changes_float64_log_probs_by_rounding_only(name, tiny, make_requests):
    """As on ranks that divide the prompts among them."""
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


def test_samples_come_in_parts_as_they_finish(name, tiny, make_requests):
    requests = make_requests(12)
    engine = make_engine(name, max_num_seqs=4)
    engine.update_weights(SharedModule(tiny()), 0)
    parts = list(finished(engine, requests, at_least=3))
    assert all(len(part) >= 3 for part in parts[:-1]) and len(parts) > 1
    assert sorted(sample.id for part in parts for sample in part) == sorted(r.id for r in requests)
    whole = {sample.id: sample.token_ids.tolist() for sample in generate(engine, requests)}
    assert whole == {sample.id: sample.token_ids.tolist() for part in parts for sample in part}
    assert list(finished(engine, [])) == []


def test_who_stops_reading_leaves_nothing_pending(name, tiny, make_requests):
    engine = make_engine(name, max_num_seqs=2)
    engine.update_weights(SharedModule(tiny()), 0)
    parts = finished(engine, make_requests(10, max_tokens=5))
    next(parts)
    assert engine.pending() > 0
    parts.close()
    assert engine.pending() == 0
    engine.sleep()
