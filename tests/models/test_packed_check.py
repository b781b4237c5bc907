"""The check of packing passes good models and finds bad ones.

Bad models are those in which sequences see each other or positions are counted across sequences. They are
found for any scale of the weights and any length of the windows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from tandem.cli.main import main
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.engines.train.fsdp import FSDPEngine
from tandem.errors import ModelError
from tandem.models import attention, packing
from tandem.models.loading import load_config
from tandem.models.packed_check import PackedCheck, check_packed, require_sound
from tandem.models.small_copy import LONGEST, small_copy, window_limits
from tests.support.runs import Lab, lab

__all__ = ["lab"]

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}


def folder_of(path: Path, kind: str, **changes: Any) -> Path:
    """Create a folder that has only a config.json."""
    config = CONFIG_MAPPING[kind](**(SIZES | changes))
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(path)
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every token see all tokens before it, in any sequence."""

    def whole_row(rows: list[torch.Tensor], plan: object, scale: float) -> torch.Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in rows)
        return attention._causal(q, k, v, scale)[0].transpose(0, 1)

    monkeypatch.setattr(attention, "rectangular", whole_row)


def test_a_sound_model(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = check_packed(llama)
    assert found.gradient == 0 and found.others <= 1e-12 and found.alone < 1e-9 and found.beyond < 1e-9
    assert found.sound and torch.get_default_dtype() == torch.float32
    assert main(["check", "--model", str(llama)]) == 0
    assert "can be trained packed" in capsys.readouterr().out


def test_sequences_that_see_each_other(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leak(monkeypatch)
    found, _ = check_packed(llama)
    assert found.gradient > 0 and found.others > 1e-3 and not found.sound
    assert main(["check", "--model", str(llama)]) == 1
    assert "cannot be trained packed" in capsys.readouterr().out
    with pytest.raises(ModelError, match="packed sequences differently"):
        FSDPEngine(
            llama,
            model=BackboneConfig(path=str(llama)),
            fsdp=FSDPConfig(),
            optim=None,
            total_steps=1,
            device=torch.device("cpu"),
        )


def test_a_leak_of_layers_without_weights_to_speak_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, "lfm2", layer_types=["conv", "full_attention"], initializer_range=1e-4)
    found, _ = check_packed(folder)
    assert found.gradient > 1e-3 and not found.sound_within
    with pytest.raises(ModelError, match="packed sequences differently"):
        require_sound(found, folder, 8)
    assert main(["check", "--model", str(folder)]) == 1
    assert "cannot be trained packed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "changes", "limit"),
    [
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 48} | EXPERTS, 48),
        ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64}, 64),
        ("mistral", {"sliding_window": 48}, 48),
    ],
)
def test_sequences_beyond_a_window_or_an_angle_limit(
    tmp_path: Path, kind: str, changes: dict[str, Any], limit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, kind, **changes)
    found, _ = check_packed(folder)
    assert found.sound_within and not found.sound and found.limit == limit
    require_sound(found, folder, limit)
    with pytest.raises(ModelError, match="of this length"):
        require_sound(found, folder, limit + 1)
    assert main(["check", "--model", str(folder)]) == 1
    assert f"cannot be trained packed beyond {limit} tokens" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["seed_oss", "starcoder2"])
def test_dropouts_of_any_name_are_off(tmp_path: Path, kind: str) -> None:
    dropouts = {"residual_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1}
    folder = folder_of(tmp_path, kind, **dropouts, sliding_window=None)
    config = load_config(folder)
    assert all(getattr(config, name, 0.0) == 0.0 for name in dropouts)
    found, _ = check_packed(folder)
    assert found.sound
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_pretrained(folder)).save_pretrained(folder)
    FSDPEngine(
        folder,
        model=BackboneConfig(path=str(folder)),
        fsdp=FSDPConfig(),
        optim=None,
        total_steps=1,
        device=torch.device("cpu"),
    )


def test_random_numbers_in_training_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="random numbers"):
        check_packed(folder_of(tmp_path, "phimoe", num_local_experts=4, num_experts_per_tok=2))


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("gpt2", {}, "no list of layers"),
        ("gemma2", {"head_dim": 8}, "plain"),
        ("cohere", {"logit_scale": 0.3}, "plain matrix"),
        ("granite", {"logits_scaling": 2.0}, "plain matrix"),
        ("phi", {}, "plain matrix"),
        ("mamba", {}, "cannot be trained on packed sequences"),
    ],
)
def test_what_training_has_not_is_named(
    tmp_path: Path, kind: str, changes: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, kind, **changes)
    with pytest.raises(ModelError, match=problem):
        check_packed(folder)
    assert main(["check", "--model", str(folder)]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_train_refuses_what_check_refuses_whatever_the_rollout(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "model", "lfm2", layer_types=["conv", "full_attention"])
    at = "actor_rollout_ref.model"
    words = lab.overrides(tmp_path / "run", actor_rollout_ref__rollout__name="hf")
    own = next(word for word in words if word.startswith(f"{at}.path=")).partition("=")[2]
    assert main(["train", *words, f"{at}.path={folder}", f"{at}.tokenizer_path={own}"]) == 1
    assert "packed sequences differently" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_nan_is_not_sound() -> None:
    assert not PackedCheck(0.0, float("nan"), 0.0, 0.0).sound_within
    assert not PackedCheck(0.0, 0.0, 0.0, float("nan")).sound


def test_a_small_copy_keeps_every_kind_of_layer() -> None:
    kinds = ["full_attention"] * 28 + ["sliding_attention"] * 4
    config: PreTrainedConfig = CONFIG_MAPPING["qwen2"](
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_sliding_window=True,
        sliding_window=4096,
        max_window_layers=28,
    )
    assert config.layer_types == kinds
    small: Any = small_copy(config)
    assert set(small.layer_types) == set(kinds) and len(small.layer_types) == small.num_hidden_layers < 8
    assert small.hidden_size == 256 and small.num_attention_heads == 32 and small.num_key_value_heads == 8
    assert small.vocab_size < 100 and max(window_limits(small)) < LONGEST
    assert window_limits(config) == [4096]


def test_a_small_copy_keeps_layers_that_are_listed_by_number() -> None:
    config = CONFIG_MAPPING["qwen3_moe"](
        **(SIZES | EXPERTS | {"num_hidden_layers": 20, "mlp_only_layers": [17]})
    )
    small: Any = small_copy(config)
    assert small.num_hidden_layers == 3 and small.mlp_only_layers == [2]


def test_embeddings_that_cannot_be_seen_are_no_proof(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "requires_grad", property(lambda tensor: False))
    found, _ = check_packed(llama)
    assert math.isnan(found.gradient) and not found.sound_within


def test_positions_that_count_through(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(packing.Packing):
        def __init__(self, lengths: list[int], device: torch.device, split: None = None) -> None:
            super().__init__(lengths, device, split)
            self.position_ids = 7 * self.position_ids

    monkeypatch.setattr(packing, "Packing", Wrong)
    found, _ = check_packed(llama)
    assert found.gradient == 0 and found.alone > 0.01 and not found.sound


def test_one_folder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model"]) == 1
    assert "--model takes one folder" in capsys.readouterr().err


def test_weights_with_nan_are_no_matter_of_packing(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="not finite") as caught:
        FSDPEngine(
            llama,
            model=BackboneConfig(path=str(llama)),
            fsdp=FSDPConfig(),
            optim=None,
            total_steps=1,
            device=torch.device("cpu"),
        )
    assert "NaN" in str(caught.value.got)
