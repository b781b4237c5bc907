"""Persistent buffers are weights: they are sent, compared and saved. An example are GLM-4's expert biases."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engines.weight_sync import module_digest
from tandem.models.weight_files import persistent_buffers, stored_tensors
from tests.engines.train.on_ranks import on_ranks
from tests.engines.train.synthetic import make_engine
from tests.support.families import make_family

DIVISIONS = {
    "shards": {},
    "layers": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
}


def engine_of(folder, keys, rank):
    return make_engine(folder, fsdp=keys, precision="bf16", model={"lora_rank": rank})


def journey(folder, saved, keys, rank):
    """Return an engine's digests at the start, with other weights and after loading, and its weights."""
    engine = engine_of(folder, keys, rank)
    engine.save(saved)
    digests = [engine.digest()]
    if rank:
        engine = engine_of(folder, keys, rank)
    else:
        engine.load_weights(((name, 2 * value) for name, value in engine.weights()), 1)
    digests.append(engine.digest())
    engine.load(saved)
    weights = {name: value.clone() for name, value in engine.weights(dtype=torch.bfloat16)}
    return [*digests, engine.digest()], weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("model"), "glm4_moe")


QUICK = [("alone", 0), ("alone", 2)]
SLOW = [*((name, 0) for name in DIVISIONS), ("shards", 2), ("layers", 2)]
CELLS = [*QUICK, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW)]


@pytest.mark.parametrize(("division", "rank"), CELLS)
def test_constants_are_sent_compared_and_saved(folder, tmp_path, division, rank):
    given = (str(folder), tmp_path / "saved", DIVISIONS.get(division, {}), rank)
    found = [journey(*given)] if division == "alone" else on_ranks(journey, *given)
    model, other = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for _ in range(2))
    if not rank:
        for value in stored_tensors(other).values():
            value.data.mul_(2)
    wanted = module_digest(model)
    for digests, weights in found:
        assert digests == [wanted, module_digest(other), wanted]
        for name, value in persistent_buffers(model).items():
            assert weights[name].dtype == torch.float32 and torch.equal(weights[name], value.float())
