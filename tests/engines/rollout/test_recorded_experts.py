"""The experts that the engines in this process record, against a forward pass over each sequence alone."""

from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.native import steps
from tandem.engines.rollout.native.graphs import GraphedRunner
from tandem.engines.rollout.own_weights import OwnWeights
from tandem.errors import EngineError, ModelError
from tandem.models.experts import EXPERTS
from tandem.models.routing import Mixtures
from tests.contract.world import SHAPE
from tests.engines.rollout.case import CPU, changed, check_experts, drain, native, request, stream
from tests.support.marks import slow_but
from tests.support.refusing import refused

HEADS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
WINDOW = {"sliding_window": 6}
MODELS = {
    "qwen3_moe": {"num_experts": 6},
    "deepseek_v3": {
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        **LATENT,
    },
    "gpt_oss": {"num_local_experts": 6, **WINDOW},
    "mixtral": {"num_local_experts": 6, **WINDOW},
    "olmoe": {"num_experts": 260, "intermediate_size": 8},
}


def mixture(name):
    torch.manual_seed(3)
    heads = HEADS | {"num_key_value_heads": 4 if name == "deepseek_v3" else 2}
    options = SHAPE | heads | MODELS[name] | {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
    config = CONFIG_MAPPING[name](**options)
    config._experts_implementation = EXPERTS
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.mixtures = Mixtures(model)
    return model


def make(model, graphs=False, **options):
    """Make an engine that records. With `graphs`, decode steps run in the fixed buffers of CUDA graphs."""
    engine = native(model, block_size=4, max_length=400, records_experts=True, **options)
    engine._steps.graphs = engine._split_steps = graphs
    return engine


@pytest.fixture(autouse=True)
def no_capture(monkeypatch):
    again = partial(GraphedRunner, capture=lambda work: work)
    monkeypatch.setattr(steps, "GraphedRunner", again)


CASES = [
    *[(name, {}) for name in MODELS],
    ("qwen3_moe", {"run_ahead": True, "max_num_batched_tokens": 7}),
    ("qwen3_moe", {"runner": "module", "run_ahead": True}),
    ("qwen3_moe", {"enable_chunked_prefill": False}),
    ("qwen3_moe", {"enable_prefix_caching": False}),
    ("gpt_oss", {"run_ahead": True, "max_num_batched_tokens": 9}),
    ("gpt_oss", {"run_ahead": True, "graphs": True}),
]


@pytest.mark.parametrize("case", slow_but((CASES[3], CASES[5]), CASES), ids=str)
def test_recorded_experts_are_those_of_each_sequence_alone(case, make_requests):
    name, options = case
    model = mixture(name)
    requests = [each for each in make_requests(14, 3, temperature=1.0) if len(each.prompt_ids) > 1]
    engine = make(model, max_num_seqs=12, num_gpu_blocks_override=25, **options)
    engine.submit(requests)
    samples = drain(engine)
    assert engine.stats()["preemptions"] > 0
    check_experts(model, requests, samples)
    # The next turns find the blocks of the first ones.
    follow = [
        request(
            f"next {each.uid}", each.id[1], [*each.prompt_ids, *samples[each.id].token_ids, 5], max_tokens=9
        )
        for each in requests[-12:]
    ]
    engine.submit(follow)
    check_experts(model, follow, drain(engine))
    assert engine.stats()["cached_prefix_tokens"] > 0 or "enable_prefix_caching" in options


def test_the_cache_grows_and_aborted_responses_go_on_under_new_weights():
    model = mixture("qwen3_moe")
    engine = make(model, max_num_seqs=8)
    first = [request("a", i, 9, max_tokens=30) for i in range(3)]
    engine.submit(first)
    for _ in range(5):
        assert engine.poll(0.0) == []
    more = [request("b", i, 50, max_tokens=40) for i in range(5)]
    engine.submit(more)
    [cut] = engine.abort([first[0].id], keep_partial=True)
    assert cut.routed_experts is None and 0 < len(cut.token_ids) < 30
    check_experts(model, first[1:] + more, drain(engine))
    engine.update_weights(SharedModule(changed(model)), 1)
    rest = request("a", 0, [*first[0].prompt_ids, *cut.token_ids], first=9, max_tokens=20)
    check_experts(model, [rest], {rest.id: generate(engine, [rest])[0]})


def test_weights_of_a_stream_are_recorded_too(tmp_path):
    model = mixture("qwen3_moe")
    model.save_pretrained(tmp_path)
    engine = make(None, own=OwnWeights(tmp_path, CPU))
    engine.update_weights(stream(model), 0)
    asked = request("a", prompt=9, max_tokens=30)
    check_experts(model, [asked], {asked.id: generate(engine, [asked])[0]})


@pytest.mark.parametrize("name", slow_but(["deepseek_v3"], MODELS))
def test_the_engine_of_transformers_records_too(name, make_requests):
    model, requests = mixture(name), make_requests(4, 2, temperature=1.0)
    engine = HFEngine(device=CPU, max_length=128, max_num_seqs=5, records_experts=True)
    engine.update_weights(SharedModule(model), 0)
    engine.submit(requests)
    check_experts(model, requests, drain(engine))


def test_what_cannot_be_recorded_is_refused(tiny):
    refused(ModelError, lambda: make(tiny(), runner="module"))
    refused(EngineError, lambda: make(tiny(), runner="fused"))
    assert generate(native(mixture("qwen3_moe")), [request()])[0].routed_experts is None
