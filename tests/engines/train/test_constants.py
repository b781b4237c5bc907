"""Persistent buffers, such as the biases of experts in GLM-4, are weights: they are sent, compared and saved."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engines.weight_sync import module_digest
from tandem.models.weight_files import persistent_buffers, stored_tensors
from tests.engines.train.on_ranks import on_ranks
from tests.engines.train.synthetic import make_engine
from tests.support.families import make_family
from tests.support.marks import slow_but

DIVISIONS = {
    "alone": (1, {}),
    "shards": (2, {}),
    "layers": (2, {"tensor_parallel_size": 2}),
    "stages": (2, {"pipeline_parallel_size": 2}),
}


def journey(folder, saved, keys, adapters):
    """Return the digests of an engine and its weights: at the start, after a change, and after loading."""
    engine = make_engine(folder, fsdp=keys, precision="bf16", model={"lora_rank": 2} if adapters else None)
    engine.save(saved)
    found = [engine.digest()]
    constants = persistent_buffers(engine.module).values()
    if not adapters:
        doubled = {name: 2 * value for name, value in engine.weights()}
        engine.load_weights(doubled.items(), 1)
    found.append(engine.digest())
    for constant in constants:
        constant.zero_()
    if adapters:
        engine = make_engine(folder, fsdp=keys, precision="bf16", model={"lora_rank": 2})
    engine.load(saved)
    weights = {name: value.clone() for name, value in engine.weights(dtype=torch.bfloat16)}
    return [*found, engine.digest()], weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("model"), "glm4_moe")


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("division", slow_but(["alone", "layers"], DIVISIONS))
def test_constants_are_sent_compared_and_saved(folder, tmp_path, division, adapters):
    ranks, keys = DIVISIONS[division]
    if division == "stages" and adapters:
        pytest.skip("adapters are not divided into stages")
    given = (str(folder), tmp_path / "saved", keys, adapters)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    first, second = module_digest(model), None
    if not adapters:
        with torch.no_grad():
            for value in stored_tensors(model).values():
                value.mul_(2)
        second = module_digest(model)
    constants = persistent_buffers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    for digests, weights in [journey(*given)] if ranks == 1 else on_ranks(journey, *given, ranks=ranks):
        assert digests == [first, second or first, first]
        for name, value in constants.items():
            assert weights[name].dtype == torch.float32 and torch.equal(weights[name], value.float())
