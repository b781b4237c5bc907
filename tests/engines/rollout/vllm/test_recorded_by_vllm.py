"""The experts that a real vLLM records, against a forward pass over each sequence alone; `make test-vllm`."""

from contextlib import closing

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.errors import EngineError
from tandem.models.routing import Mixtures
from tests.engines.rollout.case import CPU, changed, check_experts, decode, drain, request, stream
from tests.engines.rollout.vllm.models import check_samples
from tests.engines.rollout.vllm.ranks import Ranks, vllm_engine
from tests.support.families import make_family
from tests.support.marks import slow_but
from tests.support.refusing import refused

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "hidden_size": 128}
LAYERS = [f"{kind}_attention" for kind in ("sliding", "full", "sliding")]
FAMILIES = {
    "qwen3_moe": {"mlp_only_layers": [1]},
    "glm4_moe": {},
    "mixtral": {},
    "gpt_oss": {"layer_types": LAYERS},
    "deepseek_v3": LATENT,
}
OPTIONS = {"max_length": 300, "max_num_seqs": 6, "records_experts": True}
VOCABULARY = 40


def mixture(folder, family):
    sizes = {"head_dim": 32, "num_hidden_layers": 3, "max_position_embeddings": 512} | FAMILIES[family]
    path = make_family(folder, family, **sizes)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.mixtures = Mixtures(model)
    return model, str(path)


def make(model, path):
    return vllm_engine.VLLMEngine(model_path=path, config=model.config, device=CPU, decode=decode, **OPTIONS)


def asked(uid, lengths, **params):
    rng = np.random.default_rng(len(uid))
    prompts = [rng.integers(0, VOCABULARY, size=length) for length in lengths]
    options = {"max_tokens": 20, "temperature": 1.0, **params}
    return [request(f"{uid}{i}", k, prompt, **options) for i, prompt in enumerate(prompts) for k in range(2)]


@pytest.mark.parametrize("family", slow_but(["qwen3_moe"], list(FAMILIES)[:-1]))
def test_recorded_experts_are_those_of_each_sequence_alone(tmp_path, family):
    model, path = mixture(tmp_path, family)
    with closing(make(model, path)) as engine:
        engine.update_weights(stream(model), 0)
        stopping = asked("stop", [9, 140], stop=(decode([7]), decode([11]), decode([13])))
        requests = asked("first", [1, 30, 200, 256]) + stopping
        engine.submit(requests)
        for _ in range(4):
            engine.poll(0.0)
        engine.update_weights(stream(model), 1)  # the running sequences are computed again
        samples = drain(engine)
        check_experts(model, requests, samples)
        check_samples(model, requests, [samples[each.id] for each in requests])
        assert any(samples[each.id].finish_reason == "stop" for each in stopping)
        follow = [
            request("next", i, [*each.prompt_ids, *samples[each.id].token_ids, 5], max_tokens=9)
            for i, each in enumerate(requests)
        ]
        engine.submit(follow)
        check_experts(model, follow, drain(engine))
        assert engine.stats()["cached_prefix_tokens"] > 128  # vLLM has blocks of 128 tokens here
        engine.update_weights(stream(changed(model)), 2)
        engine.submit(requests)
        [cut] = engine.abort([requests[0].id], keep_partial=True)
        assert cut.routed_experts is None
        check_experts(model, requests[1:], drain(engine))


@pytest.mark.slow
def test_two_ranks_record_the_same(tmp_path):
    model, path = mixture(tmp_path, "qwen3_moe")
    with closing(Ranks()) as ranks:
        engine = ranks.engine(path, **OPTIONS)
        engine.update_weights(stream(model), 0)
        requests = asked("first", [1, 30, 200])
        engine.submit(requests)
        check_experts(model, requests, drain(engine))


def test_without_a_cache_of_prefixes_nothing_is_recorded(tmp_path):
    model, path = mixture(tmp_path, "deepseek_v3")  # for which vLLM has none on CPUs
    refused(EngineError, lambda: make(model, path), "prefix caching")
