"""Adapter folders that training starts from: errors name what peft would apply and Tandem does not."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import ConfigError
from tests.engines.train import synthetic
from tests.engines.train.models import ADAPTERS, peft_folder


def start(folder, adapter):
    model = {**ADAPTERS, "lora_adapter_path": str(adapter)}
    return synthetic.make_engine(folder, model=model)


def test_what_changes_nothing_is_no_other_adapter(folder, tmp_path):
    """Dropout, initial values and patterns that repeat the default are accepted."""
    patterns = {"alpha_pattern": {"q_proj": 6}, "rank_pattern": {"o_proj": 3}}
    peft_folder(folder, tmp_path, lora_dropout=0.1, init_lora_weights="gaussian", **patterns)
    start(folder, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("peft_type", "LOHA"), ("of_next_year", {"a": 1}), ("use_qalora", True), ("r", None)]
)
def test_fields_of_an_adapter_that_are_not_applied_are_named(folder, tmp_path, field, value):
    peft_folder(folder, tmp_path)
    file = tmp_path / "adapter_config.json"
    stored = json.loads(file.read_text()) | {field: value}
    if value is None:  # peft's own default, which is 8
        del stored[field]
    file.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=field):
        start(folder, tmp_path)


def test_weights_beside_the_adapters_are_named(folder, tmp_path):
    """Save an enlarged embedding with the adapters, as peft does without a note in its config."""
    peft_folder(folder, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    name = "base_model.model.model.embed_tokens.weight"
    save_file(load_file(file) | {name: torch.zeros(3, 3)}, file)
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight"):
        start(folder, tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": 4}, "r=4"),
        ({"lora_alpha": 5}, "lora_alpha=5"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save=['embed_tokens']"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices=[1, 2]"),
        ({"alpha_pattern": {"q_proj": 32}}, "alpha_pattern={'q_proj': 32}"),
        ({"rank_pattern": {"q_proj": 5}}, "rank_pattern={'q_proj': 5}"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"target_modules": ["q_proj"]}, "down_proj.lora_A.weight is missing"),
        (None, "no adapter"),
    ],
)
def test_other_adapters_are_no_start(folder, tmp_path, changes, said):
    if changes is not None:
        peft_folder(folder, tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"model\.lora_adapter_path") as caught:
        start(folder, tmp_path)
    assert said in str(caught.value)
