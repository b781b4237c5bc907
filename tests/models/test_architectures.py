"""Architectures that cannot be trained are refused by name before any weight is read."""

import json

import pytest
from transformers import BloomConfig, MambaConfig, Qwen3Config, T5Config

from tandem.cli.main import main
from tandem.config.model import PLAIN_DECODERS
from tandem.errors import ModelError
from tandem.models.architectures import may_pack, require_task
from tandem.models.loading import load_config, load_policy
from tandem.models.packed_check import check_packed
from tests.support.runs import lab

__all__ = ["lab"]

UNKNOWN = {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such_model"}
T5 = T5Config().to_dict() | {"architectures": ["T5ForConditionalGeneration"]}


@pytest.fixture
def folder_of(tmp_path):
    """Return a function that makes a model folder with only a config.json, because no weights are read."""

    def make(stored):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(stored))
        return tmp_path / "model"

    return make


def refused(call, *arguments, **options):
    with pytest.raises(ModelError) as caught:
        call(*arguments, **options)
    return caught.value


def test_one_that_transformers_does_not_have(folder_of):
    folder = folder_of(UNKNOWN)
    error = refused(load_config, folder)
    assert all(word in error.got for word in (str(folder), "NoSuchForCausalLM", "no_such_model"))
    assert all(kind in error.expected for kind in PLAIN_DECODERS)
    folder_of(UNKNOWN | {"auto_map": {"AutoConfig": "own.OwnConfig"}})
    assert "trust_remote_code=true" in refused(load_config, folder).remedy


def test_one_that_is_no_language_model(folder_of):
    folder = folder_of(T5)
    assert "T5ForConditionalGeneration" in refused(load_policy, folder).got
    assert "sequence classifier" in str(refused(require_task, folder, MambaConfig(), scorer=True))
    assert require_task(folder, Qwen3Config()).__name__ == "Qwen3ForCausalLM"


@pytest.mark.parametrize("config", [BloomConfig(), MambaConfig()], ids=["own attention", "a state"])
def test_one_that_cannot_be_packed_is_trained_in_rows(folder_of, config):
    """A folder's own code is packed, because only a trial run shows whether it can be."""
    name = type(config).__name__.replace("Config", "ForCausalLM")
    folder = folder_of(config.to_dict() | {"architectures": [name]})
    found, _ = check_packed(folder)
    assert found.in_rows and found.sound and "row of its own" in found.lines[0]
    own = type(config)(auto_map={"AutoModelForCausalLM": "own.Own"})
    assert may_pack(require_task(folder, own, trust_remote_code=True), own)
    assert not may_pack(require_task(folder, own), own)


@pytest.mark.parametrize("kind", PLAIN_DECODERS)
def test_plain_decoders_can_be_packed(folder_of, kind):
    folder = folder_of({"model_type": kind})
    for scorer in (False, True):
        config = load_config(folder)
        assert may_pack(require_task(folder, config, scorer=scorer), config)


@pytest.mark.parametrize("stored", [UNKNOWN, T5], ids=["unknown", "T5"])
def test_check_and_train_refuse_it_before_a_run_begins(lab, tmp_path, capsys, folder_of, stored):
    at = "actor_rollout_ref.model"
    paths = (f"{at}.path={folder_of(stored)}", f"{at}.tokenizer_path={lab.model}")
    for command in ("check", "train"):
        assert main([command, *lab.overrides(tmp_path / "run"), *paths]) == 1
        assert stored["architectures"][0] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
