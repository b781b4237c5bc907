"""Layers of a pipeline's stages, and settings that pipelines and tensor parallelism refuse."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import DiffLlamaConfig, LlamaConfig, Qwen2Config

from tandem.errors import ConfigError, ModelError
from tandem.models.collectives import CollectiveMeter
from tandem.models.loading import load_policy
from tandem.models.packing import pack
from tandem.models.parallel import init_distributed
from tandem.models.pipeline import HIDDEN, Pipeline, check_pipeline, own_layers
from tandem.models.policy import PolicyModel
from tandem.models.tensor_parallel import check_tensor_parallel, parallelize
from tandem.protocol import Ragged
from tests.models.small import CPU

SIZES = {
    **{"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 48},
    **{"vocab_size": 33, "hidden_size": 24},
}


def place(stage, stages):
    return Pipeline(stage, stages, None, None, CollectiveMeter())


@pytest.mark.parametrize("stages", range(1, 9))
def test_layers_are_shared_out_evenly_and_in_order(stages):
    for layers in range(stages, 40):
        found = [place(0, stages).stage_of(layer, layers) for layer in range(layers)]
        counts = [found.count(stage) for stage in range(stages)]
        assert found == sorted(found) and sum(counts) == layers
        assert max(counts) - min(counts) <= 1 and counts[-1] == min(counts)


def test_stages_in_succession_are_the_whole(qwen2_folder):
    """Also test a fixed number of tokens, with filler."""
    tokens, outputs = Ragged.from_list([[3, 1, 4, 1, 5], [9, 2, 6]]), frozenset({"log_probs"})
    whole = PolicyModel(load_policy(qwen2_folder, dtype=torch.float64))
    wanted = whole(pack(tokens, None, device=CPU), outputs)["log_probs"]
    given, hidden, names = pack(tokens, None, device=CPU, fill=20), None, []
    for stage in range(2):
        module = PolicyModel(load_policy(qwen2_folder, dtype=torch.float64))
        shapes, owners, tied = place(stage, 2).cut(module)
        assert shapes == {whole.hf_name(n): p.shape for n, p in whole.named_parameters()}
        assert len(own_layers(module)) < len(whole.decoder.layers) == len(module.decoder.layers)
        mine = {module.hf_name(name) for name, _ in module.named_parameters()}
        assert {name for name, owner in owners.items() if owner == stage} <= mine
        names.append(mine)
        out = module(replace(given, hidden=hidden), outputs)
        hidden = out.get(HIDDEN)
    assert names[0] & names[1] == ({"model.embed_tokens.weight"} if tied else set())
    assert torch.allclose(out["log_probs"], wanted, rtol=0, atol=1e-12)


def test_a_pipeline_longer_than_the_model_is_refused():
    check_pipeline(Qwen2Config(num_hidden_layers=3), 3)
    with pytest.raises(ConfigError, match="4, num_hidden_layers=3") as refused:
        check_pipeline(Qwen2Config(num_hidden_layers=3), 4)
    assert refused.value.field == "fsdp_config.pipeline_parallel_size"


@pytest.mark.parametrize(
    ("size", "options", "changed", "named"),
    [
        (3, {}, {}, "3, num_key_value_heads=4"),
        (5, {}, {}, "5, num_attention_heads=12"),
        (4, {}, {"intermediate_size": 50}, "4, intermediate_size=50"),
        (2, {"sequence": 4}, {}, "2 times ulysses_sequence_parallel_size=4, num_attention_heads=12"),
        (2, {"shards": 5}, {}, "2, vocab_size=33, hidden_size=24, 5 FSDP shards"),
        (4, {}, {"vocab_size": 5}, "4, vocab_size=5"),
    ],
)
def test_sizes_that_cannot_be_split_are_named(size, options, changed, named):
    with pytest.raises(ConfigError, match=named) as refused:
        check_tensor_parallel(LlamaConfig(**SIZES | changed), size, **options)
    assert refused.value.field == "fsdp_config.tensor_parallel_size"


def test_what_can_be_split_passes():
    check_tensor_parallel(DiffLlamaConfig(**SIZES), 1)
    check_tensor_parallel(Qwen2Config(**SIZES), 4, sequence=3, shards=8)
    check_tensor_parallel(LlamaConfig(**SIZES | {"vocab_size": 32}), 2, shards=5)


@pytest.mark.parametrize("check", [check_pipeline, check_tensor_parallel])
def test_an_architecture_that_cannot_be_divided_is_named(check):
    with pytest.raises(ModelError, match="model_type diffllama"):
        check(DiffLlamaConfig(**SIZES), 2)


def test_a_layer_that_does_not_divide_is_named(qwen2_folder):
    init_distributed(CPU)
    model = PolicyModel(load_policy(qwen2_folder))
    model.layers[1].mlp.up_proj = nn.Linear(32, 47)
    group = SimpleNamespace(
        size=2, rank=0, mesh=init_device_mesh("cpu", (1,)), entries=lambda count: slice(0)
    )
    with pytest.raises(ConfigError, match=r"2, layers\.1\.mlp\.up_proj with a weight of shape \(47, 32\)"):
        parallelize(model, group)
