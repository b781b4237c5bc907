import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.models import stored_layout
from tandem.models.stored_layout import StoredLayout
from tandem.models.weight_files import stored_tensors
from tests.support.families import FAMILIES, MIXTURES, make_family
from tests.support.marks import slow_but

QUICK = ("gpt_oss", "mixtral", "glm4_moe", "ernie4_5_moe")


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES | MIXTURES))
def test_names_and_values_are_those_of_the_folder_that_transformers_writes(tmp_path, family):
    folder = make_family(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder)

    def reused():
        for name, value in stored_tensors(model).items():
            tensor = value.detach().clone()
            yield name, tensor
            tensor.fill_(torch.nan)

    layout = StoredLayout.of(AutoConfig.from_pretrained(folder))
    found = {name: tensor.clone() for name, tensor in layout.converted(reused())}
    wanted = load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    if family in MIXTURES:
        assert any(".experts.3." in name for name in found)


def test_a_stored_tensor_of_several_weights_waits_for_all_of_them(monkeypatch):
    """In these folders, `joined` consists of the tensors `a` and `b` of a layer."""

    def reverted(model, weights):
        layers = {name[0] for name in weights}
        if not {f"{layer}.{part}" for layer in layers for part in "ab"} <= weights.keys():
            return {f"{layer}.joined": None for layer in layers}
        return {
            f"{layer}.joined": torch.cat([weights[f"{layer}.{part}"] for part in "ab"]) for layer in layers
        }

    monkeypatch.setattr(stored_layout, "revert_weight_conversion", reverted)
    weights = {f"{layer}.{part}": torch.randn(2) for layer in "01" for part in "ab"}
    model = torch.nn.ParameterDict()
    monkeypatch.setattr(model, "state_dict", lambda: weights)
    ready = []

    def stream():
        for name, value in weights.items():
            ready.append(name)
            tensor = value.clone()
            yield name, tensor
            tensor.fill_(torch.nan)

    for layer, (name, tensor) in zip("01", StoredLayout(model).converted(stream()), strict=True):
        assert name == f"{layer}.joined" and ready[-1] == f"{layer}.b"
        assert torch.equal(tensor, torch.cat([weights[f"{layer}.a"], weights[f"{layer}.b"]]))
