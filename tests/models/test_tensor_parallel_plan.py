"""Settings that tensor parallelism refuses, before and after a model is loaded."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GemmaConfig, LlamaConfig, Qwen2Config

from tandem.errors import ConfigError, ModelError
from tandem.models.collectives import CollectiveMeter
from tandem.models.loading import load_policy
from tandem.models.parallel import init_distributed
from tandem.models.policy import PolicyModel
from tandem.models.tensor_group import TensorGroup
from tandem.models.tensor_parallel import check_tensor_parallel, parallelize

SIZES = {
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 33,
    "hidden_size": 24,
}


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
def test_sizes_are_named(size, options, changed, named):
    with pytest.raises(ConfigError, match=named) as refused:
        check_tensor_parallel(LlamaConfig(**SIZES | changed), size, **options)
    assert refused.value.field == "fsdp_config.tensor_parallel_size"


def test_an_architecture_without_a_plan_is_named():
    with pytest.raises(ModelError, match="model_type gemma"):
        check_tensor_parallel(GemmaConfig(**SIZES), 2)


def test_what_can_be_split_passes():
    check_tensor_parallel(GemmaConfig(**SIZES), 1)
    check_tensor_parallel(Qwen2Config(**SIZES), 4, sequence=3, shards=8)
    check_tensor_parallel(LlamaConfig(**SIZES | {"vocab_size": 32}), 2, shards=5)


def test_weights_that_the_plan_does_not_know_are_named(qwen2_folder):
    init_distributed(torch.device("cpu"))
    group = TensorGroup(init_device_mesh("cpu", (1,)), CollectiveMeter())
    model = PolicyModel(load_policy(qwen2_folder))
    model.decoder.layers[1].gate = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"2 weights, such as model\.model\.layers\.1\.gate\.weight"):
        parallelize(model, group)
