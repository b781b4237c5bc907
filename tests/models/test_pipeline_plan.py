"""Which stage has which layers, and which models cannot be divided into stages."""

from dataclasses import replace

import pytest
import torch
from transformers import GemmaConfig, Qwen2Config

from tandem.errors import ConfigError, ModelError
from tandem.models.collectives import CollectiveMeter
from tandem.models.loading import load_policy
from tandem.models.packing import pack
from tandem.models.pipeline import HIDDEN, Pipeline, check_pipeline, own_layers
from tandem.models.policy import PolicyModel
from tandem.protocol import Ragged

CPU = torch.device("cpu")


def place(stage, stages):
    return Pipeline(stage, stages, None, None, CollectiveMeter())


@pytest.mark.parametrize("layers", range(1, 40))
@pytest.mark.parametrize("stages", range(1, 9))
def test_layers_are_shared_out_evenly_and_in_order(layers, stages):
    if stages > layers:
        return
    found = [place(0, stages).stage_of(layer, layers) for layer in range(layers)]
    counts = [found.count(stage) for stage in range(stages)]
    assert found == sorted(found) and sum(counts) == layers
    assert max(counts) - min(counts) <= 1 and counts[-1] == min(counts)


def test_stages_in_succession_are_the_whole(qwen2_folder):
    """Also test a fixed number of tokens, with filler."""
    tokens = Ragged.from_list([[3, 1, 4, 1, 5], [9, 2, 6]])
    outputs = frozenset({"log_probs"})
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


def test_what_cannot_be_cut_is_named():
    check_pipeline(Qwen2Config(num_hidden_layers=3), 3)
    with pytest.raises(ConfigError, match="4, num_hidden_layers=3") as refused:
        check_pipeline(Qwen2Config(num_hidden_layers=3), 4)
    assert refused.value.field == "fsdp_config.pipeline_parallel_size"
    with pytest.raises(ModelError, match="model_type gemma"):
        check_pipeline(GemmaConfig(), 2)
