"""Tests of the native engine with its layers split over two ranks (gloo), compared with one rank."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.runner import make_runner
from tandem.engines.rollout.native.split import LayerSplit
from tandem.errors import ConfigError, EngineError
from tandem.protocol import Request, SamplingParams
from tests.support.ranks import run_ranks

JOB = Path(__file__).with_name("split_job.py")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
MODELS = ("qwen2", "qwen3", "llama3_rope", "mistral_window")


def requests_of(rng):
    params = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=25, temperature=0.7, top_p=0.8, repetition_penalty=1.2),
        SamplingParams(max_tokens=15, temperature=0.0),
    ]
    return [
        Request(str(number), sample, rng.integers(1, 97, size=2 + 3 * number), params[number % 3])
        for number in range(6)
        for sample in range(2)
    ]


@pytest.fixture(scope="module")
def cases(tiny):
    rng = np.random.default_rng(5)
    made = {name: (tiny(name, torch.float64), requests_of(rng), {}) for name in MODELS}
    tight = {"num_gpu_blocks_override": 14, "block_size": 4, "max_num_batched_tokens": 9}
    made["preempted"] = (tiny("qwen2", torch.float64), requests_of(rng), tight)
    made["float32"] = (tiny("qwen2"), requests_of(rng), {})
    return made


@pytest.fixture(scope="module")
def ranks(cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    torch.save(cases, folder / "cases.pt")
    run_ranks(JOB, folder / "cases.pt", folder)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", [*MODELS, "preempted", "float32"])
def test_two_ranks_write_what_one_writes(cases, ranks, name):
    model, requests, options = cases[name]
    engine = NativeEngine(device=torch.device("cpu"), max_length=128, **options)
    engine.update_weights(SharedModule(model), 0)
    alone = generate(engine, requests)
    assert (engine.stats()["preemptions"] > 0) == (name == "preempted")
    for samples, layer in (rank[name] for rank in ranks):
        assert layer.kv_heads * 2 == model.config.num_key_value_heads
        for sample, (id, token_ids, log_probs, reason) in zip(alone, samples, strict=True):
            assert (sample.id, sample.token_ids.tolist(), sample.finish_reason) == (
                id,
                token_ids.tolist(),
                reason,
            )
            np.testing.assert_allclose(log_probs, sample.log_probs, rtol=0, atol=TOLERANCE[model.dtype])


def test_ranks_agree_bit_for_bit(ranks):
    for name in (*MODELS, "preempted", "float32"):
        samples, _ = ranks[0][name]
        for (_, tokens, log_probs, _), (_, other_tokens, other_log_probs, _) in zip(
            samples, ranks[1][name][0], strict=True
        ):
            assert np.array_equal(tokens, other_tokens)
            assert np.array_equal(log_probs, other_log_probs)


def test_a_rank_short_of_memory_ends_the_others_too(ranks):
    """Otherwise they would wait in a collective until its timeout."""
    for rank in ranks:
        assert "0.0 MiB free" in rank["short of memory"]


def test_a_model_that_cannot_be_split_is_refused(tiny):
    with pytest.raises(ConfigError, match="num_attention_heads=4") as caught:
        make_runner("auto", tiny(), 64, LayerSplit(0, 3))
    assert caught.value.field == "actor_rollout_ref.rollout.tensor_model_parallel_size"
    with pytest.raises(EngineError, match="only the fused runner"):
        make_runner("module", tiny(), 64, LayerSplit(0, 2))
