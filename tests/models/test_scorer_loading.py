"""Folders of reward models: which are loaded, and which are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, BertConfig, Qwen3Config

from tandem.errors import EngineError, ModelError
from tandem.models.loading import load_scorer
from tandem.models.packing import pack
from tandem.models.score import ScoreModel
from tandem.models.vocabulary import check_vocabulary, tokenizer_of_scorer
from tandem.protocol import Ragged
from tests.support.tiny import CHARACTERS, make_tokenizer

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def save(folder, config):
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "scorer", Qwen3Config(**SHAPE, num_labels=1))


def test_weights_arrive_unchanged_with_the_trained_head(folder):
    stored = load_file(folder / "model.safetensors")
    model = ScoreModel(load_scorer(folder, dtype=torch.float64))
    found = {model.hf_name(name): p for name, p in model.named_parameters()}
    assert set(found) == set(stored) and "score.weight" in found
    assert all(torch.equal(found[name], value.double()) for name, value in stored.items())
    assert not model.model.training


def test_other_outputs_are_refused(folder):
    inputs = pack(Ragged.from_list([[1, 2]]), None, device=torch.device("cpu"), whole=True)
    with pytest.raises(EngineError, match="a score model"):
        ScoreModel(load_scorer(folder))(inputs, frozenset({"values"}))


def test_a_language_model_is_no_reward_model(qwen2_folder):
    with pytest.raises(ModelError, match="reward model") as caught:
        load_scorer(qwen2_folder)
    assert "Qwen2ForCausalLM" in caught.value.got


def test_more_than_one_label(tmp_path):
    with pytest.raises(ModelError, match="one score") as caught:
        load_scorer(save(tmp_path, Qwen3Config(**SHAPE, num_labels=3)))
    assert "num_labels 3" in caught.value.got


def test_a_head_of_another_shape(tmp_path):
    shape = {name: value for name, value in SHAPE.items() if name not in ("num_key_value_heads", "head_dim")}
    with pytest.raises(ModelError, match="head is not one linear layer"):
        load_scorer(save(tmp_path, BertConfig(**shape, num_labels=1)), attention="sdpa")


def test_a_head_that_was_never_saved(qwen2_folder, tmp_path):
    config = json.loads((qwen2_folder / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(qwen2_folder / "model.safetensors")
    with pytest.raises(ModelError, match="weights are missing") as caught:
        load_scorer(tmp_path)
    assert "score.weight" in caught.value.got


def test_vocabularies(tmp_path):
    tokenizer, names = make_tokenizer(tmp_path / "policy"), {"field": "ref.path"}
    (tmp_path / "bare").mkdir()
    check_vocabulary(tmp_path / "bare", len(tokenizer), tokenizer, **names)
    check_vocabulary(tmp_path / "policy", 100, tokenizer, **names)
    assert tokenizer_of_scorer(tmp_path / "bare", tokenizer) is None
    assert tokenizer_of_scorer(tmp_path / "policy", tokenizer) is None
    own = tokenizer_of_scorer(tmp_path / "bare", tokenizer, chat_template="{{ messages }}")
    assert own is not None and own.chat_template == "{{ messages }}" != tokenizer.chat_template
    with pytest.raises(ModelError, match="vocabulary is smaller") as caught:
        check_vocabulary(tmp_path / "bare", len(tokenizer) - 1, tokenizer, **names)
    assert caught.value.expected == f">= {len(CHARACTERS) + 3}"
    other = json.loads((tmp_path / "policy" / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]
    (tmp_path / "bare" / "tokenizer.json").write_text(json.dumps(other))
    config = (tmp_path / "policy" / "tokenizer_config.json").read_text()
    (tmp_path / "bare" / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelError, match="is not the policy's") as caught:
        check_vocabulary(tmp_path / "bare", 100, tokenizer, **names)
    assert "2 tokens with other ids, such as '3'" in caught.value.got
    own = tokenizer_of_scorer(tmp_path / "bare", tokenizer)
    assert own is not None and own.encode("3") == tokenizer.encode("4")
