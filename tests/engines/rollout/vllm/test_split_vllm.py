from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.vllm import process
from tandem.engines.rollout.vllm.memory import caches
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tests.contract.rollout import RolloutContract
from tests.contract.world import VOCABULARY, EngineKind
from tests.engines.rollout.case import drain, request, stream
from tests.engines.rollout.vllm.models import build, check_update, make_requests, save
from tests.engines.rollout.vllm.ranks import Ranks, vllm_engine
from tests.support.refusing import refused

pytestmark = pytest.mark.vllm
shards = pytest.importorskip("tandem.engines.rollout.vllm.shards", exc_type=ImportError)


@pytest.fixture(scope="module")
def ranks():
    made = Ranks()
    yield made
    made.close()


class TestSplitVLLM(RolloutContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls, ranks):
        def make(world, **options):
            return ranks.engine(world.folder, decodes=True, **options)

        options = {"keyed": False, "recomputes": True, "untruncated": False, "modes": ("raw_logprobs",)}
        return EngineKind("vllm-2", make, stream, **options)


MODELS = {"qwen2": (2, 1), "qwen3": (4, 2)}  # key and value heads: one that both share, or one for each rank


@pytest.fixture(scope="module")
def engines(ranks, tmp_path_factory):
    made = {}
    for name, heads in MODELS.items():
        folder = save(build(name, seed=9, heads=heads), tmp_path_factory.mktemp(name))
        made[name] = ranks.engine(folder, max_length=256, max_num_seqs=8)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_write_what_the_model_does(engines, name):
    check_update(engines[name], build(name, heads=MODELS[name]), 0)


def spoil(engines, rank, number, name):
    """Change one number in the last rank's part of a weight, or in its copy, after the next load."""
    load = vllm_engine.load_weights

    def spoilt(model, tensors):
        load(model, tensors)
        vllm_engine.load_weights = load
        if rank:
            with torch.no_grad():
                parameter = model.get_parameter(name)
                parameter.view(-1)[3] = torch.nextafter(parameter.view(-1)[3], torch.tensor(9.0))

    vllm_engine.load_weights = spoilt


@pytest.mark.parametrize(("name", "parameter", "weight"), [
    ("qwen2", "model.norm.weight", ""), ("qwen2", "model.layers.1.mlp.down_proj.weight", ""),
    ("qwen2", "model.layers.0.self_attn.qkv_proj.bias", "model.layers.0.self_attn.q_proj.bias"),
    ("qwen3", "model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
    ("qwen2", "model.embed_tokens.weight", ""), ("qwen3", "lm_head.weight", ""),
])  # fmt: skip
def test_a_weight_that_one_rank_holds_wrongly_is_named(engines, ranks, name, parameter, weight):
    engine, model = engines[name], build(name, seed=3, heads=MODELS[name])
    sent = digest(model.named_parameters())
    assert engine.update_weights(stream(model), 1) == sent
    ranks.run(spoil, engine.number, parameter)
    held = engine.update_weights(stream(model), 2)
    assert {at for at in sent if held[at] != sent[at]} == {weight or parameter} and held.keys() == sent.keys()
    assert engine.update_weights(stream(model), 3) == sent


def wrong_copy(engines, rank, number):
    """Return the weights whose digest changes with the last rank's copy of the only key and value head."""
    model = engines[number]._model
    before = shards.weights_digest(model)
    held = {each.name: each.tensor for each in shards.held_weights(model)}
    keys = held["model.layers.1.self_attn.k_proj.weight"]
    with torch.no_grad():
        keys[5, 5] += rank
    after = shards.weights_digest(model)
    return [name for name in before if before[name] != after[name]]


def test_a_head_that_both_ranks_hold_is_compared(engines, ranks):
    engine = engines["qwen2"]
    engine.update_weights(stream(build()), 0)
    changed = ranks.run(wrong_copy, engine.number)
    assert changed == [["model.layers.1.self_attn.k_proj.weight"]] * 2


def held(engines, rank, number):
    engine = engines[number]
    parts = engine._model.parameters(), caches(engine._engine)
    return tuple(sum(part.untyped_storage().nbytes() for part in each) for each in parts)


def test_each_rank_holds_its_part_and_gives_it_back(engines, ranks):
    engine, model = engines["qwen3"], build("qwen3", heads=MODELS["qwen3"])
    engine.update_weights(stream(model), 0)
    whole = sum(p.nbytes for p in model.parameters())
    before = ranks.run(held, engine.number)
    assert all(0.5 * whole < weights < 0.65 * whole and cache > 0 for weights, cache in before)
    engine.sleep()
    assert ranks.run(held, engine.number) == [(0, 0)] * 2
    engine.update_weights(stream(model), 1)
    [sample] = generate(engine, make_requests(1))
    assert ranks.run(held, engine.number) == before
    assert sample.versions.tolist() == [1] * 12


def meetings(engines, rank):
    return [engine._engine.model_executor.meeting for engine in engines.values()]


def test_no_end_of_a_rank_leaves_shared_memory(engines, ranks):
    first, second = ranks.run(meetings)
    assert first == second and len(set(first)) == len(first) >= len(engines)
    assert not [file for name in first for file in Path("/dev/shm").glob(f"{name}*")]


def test_prefixes_are_found_alike_after_many_were_aborted(engines):
    """The order in which aborted sequences free their blocks decides which blocks are overwritten."""
    engine = engines["qwen2"]
    engine.update_weights(stream(build()), 0)
    engine.stats()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCABULARY, size=140) for _ in range(40)]  # more than the cache can hold
    for turn in range(6):
        order = rng.choice(len(prompts), 12, replace=False)
        lengths = rng.integers(2, 9, size=len(order)).tolist()
        asked = zip(order, lengths, strict=True)
        requests = [request(f"{turn} {i}", prompt=prompts[i], max_tokens=count) for i, count in asked]
        engine.submit(requests)
        for _ in range(int(rng.integers(1, 4))):
            engine.poll(0.0)
        engine.abort([each.id for each in requests[::2]], keep_partial=True)
        drain(engine)
    assert engine.stats()["cached_prefix_tokens"] > 0  # `SplitEngine` checks that both ranks report the same


def other_tokens(engines, rank, number):
    if rank:
        seed_of = process.seed_of
        process.seed_of = lambda request: seed_of(request) + 1


def test_ranks_that_write_different_tokens_are_told_so(ranks, tmp_path):
    engine = ranks.engine(save(build(), tmp_path), max_length=96, max_num_seqs=4)
    engine.update_weights(stream(build()), 0)
    ranks.run(other_tokens, engine.number)
    refused(EngineError, lambda: generate(engine, make_requests(3)), "different tokens")


def test_heads_that_cannot_be_shared_are_refused(ranks, tmp_path):
    with pytest.raises(EngineError, match="vLLM cannot run the model"):
        ranks.engine(save(build(heads=(3, 1)), tmp_path), max_length=96)
