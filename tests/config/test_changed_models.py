"""A model whose config.json a run changes has a folder of its own, which everything reads."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.config.changed_models import (
    changed_config,
    changed_folder,
    origin_of,
    position_limit,
    stored_config,
)
from tandem.config.load import load_sft_config, load_train_config
from tandem.config.written import to_dict
from tandem.errors import ConfigError, ConfigErrors
from tandem.lifetime import UNUSED_SECONDS

MODEL = "actor_rollout_ref.model"
CARD = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 5.0}
LAYERS = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_attention": LLAMA3}
CHANGES = [
    ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    ({"text_config": {"a": 1, "b": 1}}, {"text_config": {"b": 2}}, {"text_config": {"a": 1, "b": 2}}),
    (
        {"rope_theta": 5.0, "rope_scaling": None},
        {"rope_scaling": CARD},
        {"rope_theta": 5.0, "rope_scaling": YARN},
    ),
    ({}, {"rope_parameters": CARD}, {"rope_parameters": YARN}),
    ({"rope_parameters": LLAMA3}, {"rope_scaling": CARD}, {"rope_parameters": YARN | {"rope_theta": 5.0}}),
    ({}, {"rope_parameters": {"factor": 4}, "rope_scaling": CARD}, {"rope_parameters": YARN}),
    ({"rope_parameters": YARN}, {"rope_scaling": {"factor": 2}}, {"rope_parameters": YARN | {"factor": 2.0}}),
    ({"rope_parameters": LLAMA3}, {"rope_theta": 7.0}, {"rope_parameters": LLAMA3 | {"rope_theta": 7.0}}),
    (
        {"rope_parameters": LAYERS},
        {"rope_scaling": {"full_attention": CARD}},
        {"rope_parameters": LAYERS | {"full_attention": YARN | {"rope_theta": 1e6}}},
    ),
    ({"rope_scaling": YARN}, {"rope_scaling": None}, {"rope_scaling": {"rope_type": "default"}}),
]
LIMITS = [
    (32, {}, 32),
    (32, {"rope_scaling": CARD}, 128),
    (40, {"rope_scaling": YARN}, 128),
    (500, {"rope_parameters": YARN}, 500),
    (32, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, 64),
    (32, {"rope_scaling": {"type": "linear", "factor": 2.5}}, 80),
    (128, {"rope_scaling": LLAMA3}, 128),
    (32, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, None),
    (32, {"rope_parameters": LAYERS | {"full_attention": CARD}}, 128),
    (None, {"rope_scaling": CARD}, None),
]


@pytest.mark.parametrize(("stored", "override", "wanted"), CHANGES)
def test_fields_are_merged_where_the_file_has_them(stored, override, wanted):
    assert changed_config(stored, override) == wanted


@pytest.mark.parametrize(("most", "rope", "wanted"), LIMITS)
def test_the_limit_is_that_of_model_cards(most, rope, wanted):
    text = {"max_position_embeddings": most} | rope
    assert position_limit(text) == position_limit({"text_config": text}) == wanted


def test_flat_parameters_for_a_model_with_parameters_per_layer_type_are_refused():
    with pytest.raises(ConfigError, match="per type of layer"):
        changed_config({"rope_parameters": LAYERS}, {"rope_scaling": CARD})


@pytest.fixture
def model(tmp_path):
    """Return a model folder without weights, which need not exist to load a config."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 32, "vocab_size": 40}))
    (folder / "tokenizer_config.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text("{}\n")
    return folder


def test_the_folder_has_the_changes_and_links_and_is_made_once(model):
    folder = Path(changed_folder(str(model), {"rope_scaling": CARD}, 64))
    assert stored_config(folder) == stored_config(model) | {"rope_scaling": YARN, "vocab_size": 64}
    assert folder.stat().st_ino == Path(changed_folder(str(model), {"rope_scaling": CARD}, 64)).stat().st_ino
    (model / "new.safetensors").write_text("")
    assert origin_of(changed_folder(str(model), {"rope_scaling": CARD}, 64)).source == str(model)
    assert (folder / "new.safetensors").samefile(model / "new.safetensors")
    others = [changed_folder(str(model), {"rope_scaling": CARD}, None), changed_folder(str(model), {}, 64)]
    (model / "config.json").write_text('{"vocab_size": 41}')
    others.append(changed_folder(str(model), {"rope_scaling": CARD}, 64))
    assert len({*others, str(folder)}) == 4
    assert changed_folder(str(model.parent), {"a": 1}, None) is None


def test_unused_folders_are_removed_unless_a_process_holds_them(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = (
        "import sys, tandem.config.changed_models as c; print(c.changed_folder(sys.argv[1], {'a': 1}, None))"
    )
    command = [sys.executable, "-c", program, str(model)]
    left = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    held = Path(changed_folder(str(model), {"a": 2}, None))
    for folder in (left, held):
        assert folder.is_dir()
        os.utime(folder, (time.time() - UNUSED_SECONDS - 9,) * 2)
    made = Path(changed_folder(str(model), {"a": 3}, None))
    assert sorted(made.parent.iterdir()) == sorted([held, made])
    assert (model / "config.json").exists()
    held.rename(tmp_path / "elsewhere")
    assert Path(changed_folder(str(model), {"a": 2}, None)).is_dir()


def test_every_role_reads_the_changed_folder_and_files_keep_the_users_path(model):
    words = [f"{MODEL}.override_config.rope_scaling.{name}={value}" for name, value in CARD.items()]
    words += [
        f"{MODEL}.path={model}",
        f"data.train_files={model.parent / 'a.jsonl'}",
        "algorithm.adv_estimator=gae",
    ]
    loaded = load_train_config(None, [*words, "trainer.device=cpu"])
    config, written = loaded.config, to_dict(loaded.config)
    assert config.actor_rollout_ref.model.path == config.critic.model.path != str(model)
    assert position_limit(stored_config(config.critic.model.path)) == 128
    assert written["actor_rollout_ref"]["model"]["path"] == written["critic"]["model"]["path"] == str(model)
    assert sum("with the changes" in each for each in loaded.notices) == 1
    again = load_train_config(None, [written]).config
    assert again.critic.model.path == config.critic.model.path
    own = load_train_config(None, [*words, "trainer.device=cpu", "critic.model.override_config={}"]).config
    assert own.critic.model.path == str(model)


REFUSED = [
    ("vocab_size=5", "override_config.vocab_size", "set {}.resize_embeddings instead"),
    ("attn_implementation=sdpa", "override_config.attn_implementation", "set {}.attn_implementation instead"),
    ("text_config.attention_dropout=0.1", "override_config.text_config.attention_dropout", "remove it"),
    ("model_type=llama", "override_config.model_type", "remove it"),
    ("rope_scaling=yarn", "override_config.rope_scaling", None),
    ("rope_scaling.factor=four", "override_config.rope_scaling.factor", None),
    ("max_position_embeddings=0", "override_config.max_position_embeddings", None),
]


@pytest.mark.parametrize(("given", "field", "remedy"), REFUSED)
def test_fields_with_a_key_of_their_own_are_refused(model, given, field, remedy):
    words = [f"model.path={model}", f"data.train_files={model.parent / 'a.jsonl'}"]
    with pytest.raises(ConfigErrors) as wrong:
        load_sft_config(None, [*words, f"model.override_config.{given}"])
    (error,) = wrong.value.errors
    assert error.field == f"model.{field}"
    assert error.remedy == (remedy and remedy.format("model"))


def test_several_reward_models_cannot_be_changed(model):
    words = [f"{MODEL}.path={model}", f"data.train_files={model.parent / 'a.jsonl'}", "trainer.device=cpu"]
    words += ["reward_model.enable=true", f"reward_model.models={{a: {{path: {model}}}}}"]
    with pytest.raises(ConfigErrors, match="do not change these models"):
        load_train_config(None, [*words, "reward_model.model.resize_embeddings=64"])


def test_fields_without_effect_get_a_sentence(model):
    words = [f"model.path={model}", f"data.train_files={model.parent / 'a.jsonl'}", "model.lora_rank=4"]
    changes = ["model.override_config={use_cache: false, attention_dropout: 0}", "model.resize_embeddings=64"]
    said = " ".join(load_sft_config(None, [*words, *changes]).notices)
    assert "model.override_config.use_cache: no effect" in said
    assert "model.resize_embeddings=64: adapters do not train the embedding" in said


def test_a_folder_from_elsewhere_has_no_origin(tmp_path):
    """Nothing is linked or read because a downloaded folder says so."""
    (tmp_path / ".tandem.json").write_text('{"source": "/etc", "override": {}, "rows": null}')
    assert origin_of(tmp_path) is None
