from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.native.runner import make_runner
from tandem.engines.rollout.native.split import LayerSplit
from tandem.errors import ConfigError, EngineError
from tests.engines.rollout.case import native, request
from tests.support.ranks import run_ranks
from tests.support.refusing import refused

MODELS = ("qwen2", "qwen3", "llama3_rope", "mistral_window")
NAMES = (*MODELS, "preempted", "float32")


@pytest.fixture(scope="module")
def cases(tiny):
    """Return models, requests and options. "short of memory" is the last, as it ends the engine."""
    rng = np.random.default_rng(5)
    more = {"max_tokens": 25, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2}
    params = [{"max_tokens": 20}, more, {"max_tokens": 15, "temperature": 0.0}]
    made = {}
    for name in (*NAMES, "short of memory"):
        prompts = [rng.integers(1, 97, size=2 + 3 * number) for number in range(6)]
        requests = [request(str(i), n, prompts[i], **params[i % 3]) for i in range(6) for n in range(2)]
        dtype = torch.float32 if name == "float32" else torch.float64
        made[name] = tiny(name if name in MODELS else "qwen2", dtype), requests, {}
    made["preempted"][2].update(num_gpu_blocks_override=14, block_size=4, max_num_batched_tokens=9)
    return made


@pytest.fixture(scope="module")
def ranks(cases, tmp_path_factory):
    folder, job = tmp_path_factory.mktemp("split"), Path(__file__).with_name("split_job.py")
    torch.save(cases, folder / "cases.pt")
    run_ranks(job, folder / "cases.pt", folder)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_write_what_one_writes_and_agree_bit_for_bit(cases, ranks, name):
    model, requests, options = cases[name]
    engine, atol = native(model, **options), 1e-12 if model.dtype == torch.float64 else 2e-5
    alone = generate(engine, requests)
    assert (engine.stats()["preemptions"] > 0) == (name == "preempted")
    for samples, layer in (rank[name] for rank in ranks):
        assert layer.kv_heads * 2 == model.config.num_key_value_heads
        for sample, other, first in zip(alone, samples, ranks[0][name][0], strict=True):
            assert (other.id, other.finish_reason) == (sample.id, sample.finish_reason)
            assert other.token_ids.tolist() == sample.token_ids.tolist()
            np.testing.assert_allclose(other.log_probs, sample.log_probs, rtol=0, atol=atol)
            assert np.array_equal(other.log_probs, first.log_probs)


def test_a_rank_short_of_memory_ends_the_others_too(ranks):
    """Otherwise they would wait in a collective until its timeout."""
    for rank in ranks:
        assert "0.0 MiB free" in rank["short of memory"]


def test_a_model_that_cannot_be_split_is_refused(tiny):
    with pytest.raises(ConfigError, match="num_attention_heads=4") as caught:
        make_runner("auto", tiny(), 64, LayerSplit(0, 3))
    assert caught.value.field == "actor_rollout_ref.rollout.tensor_model_parallel_size"
    refused(EngineError, lambda: make_runner("module", tiny(), 64, LayerSplit(0, 2)), "only the fused runner")
