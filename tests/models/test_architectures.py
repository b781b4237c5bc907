"""Architectures that cannot be trained are refused by name before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import BloomConfig, MambaConfig, PreTrainedConfig, Qwen3Config, T5Config

from tandem.cli.main import main
from tandem.config.model import PLAIN_DECODERS
from tandem.errors import ModelError
from tandem.models.architectures import require_packable, require_task
from tandem.models.loading import load_config, load_policy
from tandem.models.packed_check import check_packed
from tests.support.runs import Lab, lab

__all__ = ["lab"]

UNKNOWN = {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such_model"}


def folder_of(path: Path, stored: dict[str, object]) -> Path:
    """Create a model folder that has only a config.json, because no weights are read."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(stored))
    return path


def saved(path: Path, config: PreTrainedConfig, architecture: str) -> Path:
    return folder_of(path, config.to_dict() | {"architectures": [architecture]})


def test_one_that_transformers_does_not_have(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", UNKNOWN)
    with pytest.raises(ModelError, match="does not know this architecture") as caught:
        load_config(folder)
    assert str(folder) in caught.value.got
    assert "NoSuchForCausalLM" in caught.value.got and "no_such_model" in caught.value.got
    assert all(kind in caught.value.expected for kind in PLAIN_DECODERS)
    folder_of(folder, UNKNOWN | {"auto_map": {"AutoConfig": "own.OwnConfig"}})
    with pytest.raises(ModelError, match="does not know this architecture") as caught:
        load_config(folder)
    assert caught.value.remedy is not None and "trust_remote_code=true" in caught.value.remedy


def test_one_that_is_no_language_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", T5Config(), "T5ForConditionalGeneration")
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model") as caught:
        load_policy(folder)
    assert "T5ForConditionalGeneration" in caught.value.got
    with pytest.raises(ModelError, match="cannot be loaded as a sequence classifier"):
        require_task(folder, MambaConfig(), scorer=True)


@pytest.mark.parametrize("config", [BloomConfig(), MambaConfig()], ids=["own attention", "a state"])
def test_one_that_cannot_be_packed(tmp_path: Path, config: PreTrainedConfig) -> None:
    name = type(config).__name__.replace("Config", "ForCausalLM")
    folder = saved(tmp_path / "model", config, name)
    with pytest.raises(ModelError, match="cannot be trained on packed sequences") as caught:
        check_packed(folder)
    assert name in caught.value.got


def test_the_folders_own_code_is_asked_by_running_it(tmp_path: Path) -> None:
    config = MambaConfig(auto_map={"AutoModelForCausalLM": "own.Own"})
    require_packable(tmp_path, config, trust_remote_code=True)
    with pytest.raises(ModelError, match="packed"):
        require_packable(tmp_path, config)


@pytest.mark.parametrize("kind", PLAIN_DECODERS)
def test_plain_decoders_can_be_packed(tmp_path: Path, kind: str) -> None:
    config = load_config(folder_of(tmp_path / kind, {"model_type": kind}))
    for scorer in (False, True):
        require_packable(tmp_path / kind, config, scorer=scorer)
    assert require_task(tmp_path, Qwen3Config()).__name__ == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("stored", "telling"),
    [(UNKNOWN, "NoSuchForCausalLM"), (T5Config(architectures=["T5Model"]).to_dict(), "T5Model")],
)
def test_check_and_train_refuse_it_before_a_run_begins(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], stored: dict[str, object], telling: str
) -> None:
    folder, at = folder_of(tmp_path / "model", stored), "actor_rollout_ref.model"
    words = lab.overrides(tmp_path / "run")
    own = next(word for word in words if word.startswith(f"{at}.path=")).partition("=")[2]
    words += [f"{at}.path={folder}", f"{at}.tokenizer_path={own}"]
    for command in ("check", "train"):
        assert main([command, *words]) == 1
        assert telling in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
