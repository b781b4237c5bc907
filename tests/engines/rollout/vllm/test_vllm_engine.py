"""Tests of the vLLM engine in this process, on a real vLLM.

See `make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.vllm.memory import caches
from tandem.engines.weight_sync import Sent, WeightSyncError, check_arrival, digest
from tandem.errors import EngineError
from tandem.protocol import Request, SamplingParams
from tests.engines.rollout.vllm.models import VOCABULARY, build, log_probs, make_requests, save, stream

pytest.register_assert_rewrite("tests.contract.rollout")
from tests.contract.rollout import RolloutContract  # noqa: E402
from tests.contract.world import EngineKind  # noqa: E402

pytestmark = pytest.mark.vllm
vllm_engine = pytest.importorskip("tandem.engines.rollout.vllm.engine", exc_type=ImportError)

CPU = torch.device("cpu")


def make(world: Any, **options: Any) -> Any:
    return vllm_engine.VLLMEngine(
        model_path=str(world.folder), config=world.module.config, device=CPU, decode=world.decode, **options
    )


class TestVLLM(RolloutContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls) -> EngineKind:
        return EngineKind("vllm", make, stream, keyed=False, untruncated=False, modes=("raw_logprobs",))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield an engine. The weights in its folder are not those of `build()`."""
    folder = save(build(seed=9), tmp_path_factory.mktemp("model"))
    config = build().config
    rng_before = torch.get_rng_state()
    engine = vllm_engine.VLLMEngine(
        model_path=folder,
        config=config,
        device=CPU,
        max_length=256,
        max_num_seqs=8,
    )
    assert torch.equal(torch.get_rng_state(), rng_before)
    with pytest.raises(EngineError, match="no weights"):
        generate(engine, make_requests(1))
    assert engine.pending() == 0
    yield engine
    engine.close()
    engine.close()


@pytest.fixture
def model() -> PreTrainedModel:
    return build()


@pytest.fixture
def engine(made: Any, model: PreTrainedModel) -> Any:
    made.abort([writing.request.id for writing in made._writing.values()])
    assert made.update_weights(stream(model), 0) == digest(model.named_parameters())
    made.stats()
    return made


def test_a_sample_is_drawn_alike_in_any_company(engine):
    requests = make_requests(5, 3, temperature=1.2)
    runs = [
        {sample.id: sample.token_ids.tolist() for sample in generate(engine, order)}
        for order in (requests, requests[::-1], requests[4:9])
    ]
    assert runs[0] == runs[1]
    assert runs[2].items() <= runs[0].items()
    assert len({tuple(tokens) for tokens in runs[0].values()}) == len(requests)
    others = generate(engine, make_requests(5, 3, temperature=1.2, seed=1))
    assert all(runs[0][sample.id] != sample.token_ids.tolist() for sample in others)


def test_abort(engine):
    requests = make_requests(12, max_tokens=30)
    engine.submit(requests)
    for _ in range(6):
        engine.poll(0.0)
    partial = engine.abort([requests[0].id, requests[11].id, ("unknown", 0)], keep_partial=True)
    assert [(sample.id, sample.finish_reason) for sample in partial] == [
        (requests[0].id, "abort"),
        (requests[11].id, "abort"),
    ]
    assert 0 < len(partial[0].token_ids) < 30 and len(partial[1].token_ids) == 0
    assert engine.pending() == 10
    engine.submit([requests[0]])
    done = {}
    while engine.pending():
        done |= {sample.id: sample for sample in engine.poll(10.0)}
    assert done.keys() == {request.id for request in requests[:11]}
    again = done[requests[0].id].token_ids
    assert again[: len(partial[0].token_ids)].tolist() == partial[0].token_ids.tolist()


def test_weights_may_change_in_mid_response(engine, model):
    """Tokens generated before the update have the old version.

    Later tokens are drawn from the new weights, with keys and values of the new weights too.
    """
    requests = make_requests(4, temperature=0.9, max_tokens=20)
    engine.submit(requests)
    for _ in range(8):
        engine.poll(0.0)
    new = build(seed=5)
    engine.update_weights(stream(new), 7)
    done = {}
    while engine.pending():
        done |= {sample.id: sample for sample in engine.poll(10.0)}
    for request in requests:
        sample = done[request.id]
        old = int((sample.versions == 0).sum())
        assert 0 < old < 20 and sample.versions.tolist() == [0] * old + [7] * (20 - old)
        before, after = (log_probs(weights, request, sample) for weights in (model, new))
        np.testing.assert_allclose(sample.log_probs[:old], before[:old], atol=1e-4, rtol=0)
        np.testing.assert_allclose(sample.log_probs[old:], after[old:], atol=1e-4, rtol=0)


def test_cached_prefixes_are_of_the_weights(engine):
    prompt = np.random.default_rng(1).integers(
        0, VOCABULARY, size=200
    )  # vLLM's blocks on a CPU have 128 tokens
    requests = [Request("a", i, prompt, SamplingParams(max_tokens=5)) for i in range(4)]
    generate(engine, requests)
    generate(engine, requests)
    stats = engine.stats()
    assert stats["cached_prefix_tokens"] >= 4 * 128
    assert stats["prefill_tokens"] + stats["cached_prefix_tokens"] == 8 * 200
    new = build(seed=5)
    engine.update_weights(stream(new), 1)
    for request, sample in zip(requests, generate(engine, requests), strict=True):
        np.testing.assert_allclose(sample.log_probs, log_probs(new, request, sample), atol=1e-4, rtol=0)


K_PROJ, V_PROJ = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv")


@pytest.mark.parametrize(
    ("name", "other", "what"),
    [
        ("model.embed_tokens.weight", "damaged", "is damaged"),
        ("model.layers.0.self_attn.v_proj.bias", "damaged", "is damaged"),
        ("model.layers.1.mlp.up_proj.weight", "stale", "is still that of version 0"),
        ("model.norm.weight", "stale", "is still that of version 0"),
        (K_PROJ, V_PROJ, f"the weight {V_PROJ}"),
    ],
)
def test_weights_that_did_not_arrive_are_named(engine, model, name, other, what):
    new = build(seed=5)
    old, sent = dict(model.named_parameters()), dict(new.named_parameters())

    def wrong(at: str, tensor: Tensor) -> Tensor:
        if at == other:
            return sent[name].detach().clone()
        if at != name:
            return tensor
        if other == "damaged":
            tensor.view(-1)[11] += 1e-5
            return tensor
        return (old[name] if other == "stale" else sent[other]).detach().clone()

    held = engine.update_weights(stream(new, wrong), 1)
    with pytest.raises(WeightSyncError) as caught:
        check_arrival(
            Sent(1, digest(new.named_parameters())),
            held,
            engine="vllm",
            before=Sent(0, digest(model.named_parameters())),
        )
    assert f"{name} " in caught.value.got and what in caught.value.got
    assert caught.value.message.startswith("2 of" if other == V_PROJ else "1 of")


def test_skipped_weights_leave_an_engine_without(engine, model):
    with pytest.raises(EngineError, match="incomplete") as caught:
        engine.update_weights(stream(model, lambda at, tensor: None if at == K_PROJ else tensor), 1)
    assert caught.value.field == K_PROJ
    engine.submit(make_requests(1))
    with pytest.raises(EngineError, match="no weights"):
        engine.poll(0.0)


def test_other_weights_are_refused(engine, model):
    with pytest.raises(EngineError, match="another model"):
        engine.update_weights(stream(build("qwen3")), 1)
    with pytest.raises(EngineError, match="another dtype") as caught:
        engine.update_weights(stream(build().to(torch.float64)), 1)
    assert (caught.value.got, caught.value.expected) == (torch.float64, torch.float32)
    engine.update_weights(stream(model), 2)
    generate(engine, make_requests(1))


def test_sleep_gives_memory_back(engine, model):
    requests = make_requests(3)
    before = generate(engine, requests)
    engine.submit(requests[:1])
    with pytest.raises(EngineError, match="pending"):
        engine.sleep()
    engine.abort([requests[0].id])

    def held() -> tuple[int, int]:
        parts = engine._model.parameters(), caches(engine._engine)
        return tuple(sum(part.untyped_storage().nbytes() for part in each) for each in parts)

    weights, cache = held()
    engine.sleep(("kv_cache",))
    assert held() == (weights, 0)
    for again, sample in zip(generate(engine, requests), before, strict=True):
        assert again.token_ids.tolist() == sample.token_ids.tolist()
    engine.sleep()
    engine.sleep()
    assert held() == (0, 0)
    engine.wake(("weights",))
    assert held() == (weights, 0)
    engine.submit(requests)
    with pytest.raises(EngineError, match="no weights"):
        engine.poll(0.0)
    engine.update_weights(stream(model), 3)
    done = {}
    while engine.pending():
        done |= {sample.id: sample.token_ids.tolist() for sample in engine.poll(10.0)}
    assert held() == (weights, cache)
    assert done == {sample.id: sample.token_ids.tolist() for sample in before}


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
    engine.submit([Request("bad", 3, np.array([5]), SamplingParams(max_tokens=4))])
    with pytest.raises(EngineError, match=r"\('bad', 3\) at response token 0"):
        engine.poll(1.0)


def test_what_vllm_raises_becomes_an_engine_error(engine, monkeypatch):
    def broken() -> None:
        raise RuntimeError("EngineCore died")

    engine.submit(make_requests(1))
    monkeypatch.setattr(engine._engine, "step", broken)
    with pytest.raises(EngineError, match="vLLM failed in a step") as caught:
        engine.poll(1.0)
    assert caught.value.got == "RuntimeError: EngineCore died"


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(EngineError, match="vLLM cannot run the model"):
        vllm_engine.VLLMEngine(model_path=str(tmp_path), config=build().config, device=CPU, max_length=96)


def test_a_process_group_that_is_gone_or_another_s_does_not_stop_a_close(tmp_path: Path):
    config = build().config
    folder = save(build(), tmp_path)
    made_first = torch.distributed.is_initialized()
    engine = vllm_engine.VLLMEngine(model_path=folder, config=config, device=CPU, max_length=96)
    assert torch.distributed.is_initialized()
    if not made_first:
        torch.distributed.destroy_process_group()
    engine.close()
    engine.close()
    assert torch.distributed.is_initialized() == made_first
