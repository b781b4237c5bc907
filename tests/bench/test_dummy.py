import json

import pytest
import torch

from tandem.bench import dummy
from tandem.models.loading import load_policy, load_scorer, load_tokenizer
from tests.bench.test_bench import STORED


def test_weights_in_several_files_load_as_a_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(dummy, "SHARD_BYTES", 20_000)  # the embedding has 32,768 of them
    (tmp_path / "config.json").write_text(json.dumps(STORED | {"tie_word_embeddings": False}))
    dummy.write_dummy(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    model = load_policy(tmp_path)
    weights = dict(model.named_parameters())
    assert weights["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert all(bool((weight == 1).all()) for name, weight in weights.items() if "norm" in name)
    assert len(load_tokenizer(tmp_path)) == 258


def test_a_reward_model_of_a_language_models_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(STORED))
    dummy.write_dummy(tmp_path, scorer=True)
    assert load_scorer(tmp_path).score.weight.shape == (1, 32)
