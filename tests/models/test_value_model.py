import pytest
import torch
from transformers import AutoModel

from tandem.errors import EngineError
from tandem.models.loading import load_policy
from tandem.models.packing import pack
from tandem.models.value import ValueModel
from tandem.protocol import Ragged

CPU = torch.device("cpu")
VALUES = frozenset({"values"})


def test_first_values_are_zero_and_the_head_learns(model_folder):
    tokens = Ragged.from_list([torch.randint(0, 31, (length,)) for length in (6, 3)])
    model = ValueModel(load_policy(model_folder))
    values = model(pack(tokens, None, device=CPU), VALUES)["values"]
    assert values.dtype == torch.float32 and values.tolist() == [0.0] * 9
    values.sum().backward()
    assert model.value_head.bias.grad.tolist() == [7.0]
    assert model.value_head.weight.grad.abs().sum() > 0


def test_value_of_a_token_is_read_before_it(model_folder):
    rows = [torch.randint(0, 31, (length,)) for length in (6, 3, 1)]
    tokens = Ragged.from_list(rows)
    mask = torch.ones(10, dtype=torch.bool)
    mask[2] = False
    model = ValueModel(load_policy(model_folder, dtype=torch.float64))
    torch.nn.init.normal_(model.value_head.weight)
    torch.nn.init.normal_(model.value_head.bias)
    got = model(pack(tokens, mask, device=CPU), VALUES)["values"]
    decoder = AutoModel.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="sdpa")
    zero = torch.zeros(1, dtype=torch.float64)
    expected = torch.cat(
        [
            torch.cat([zero, model.value_head(decoder(row[None]).last_hidden_state[0, :-1])[:, 0]])
            for row in rows
        ]
    )
    assert torch.allclose(got, expected * mask, atol=1e-12, rtol=0)


def test_no_language_model_head_is_kept(qwen2_folder):
    model = ValueModel(load_policy(qwen2_folder))
    names = [model.hf_name(name) for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names and "model.layers.0.mlp.up_proj.weight" in names
    with pytest.raises(EngineError, match="log_probs"):
        model(pack(Ragged.from_list([[1, 2]]), None, device=CPU), frozenset({"log_probs"}))
