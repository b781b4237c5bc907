"""A model that packs well passes; one whose sequences see each other, or whose positions count through,
is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tandem.cli.main import main
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.engines.train.fsdp import FSDPEngine
from tandem.errors import ModelError
from tandem.models import attention, packing
from tandem.models.packed_check import check_packed


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
    """Every token sees all before it, whichever sequence they are of."""

    def whole_row(rows: list[torch.Tensor], plan: object, scale: float) -> torch.Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in rows)
        return attention._causal(q, k, v, scale)[0].transpose(0, 1)

    monkeypatch.setattr(attention, "rectangular", whole_row)


def test_a_sound_model(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = check_packed(llama, dtype=torch.float64)
    assert found.alone < 1e-12 and found.reference < 1e-12 and found.sound
    assert main(["check", "--model", str(llama)]) == 0
    assert "can be trained packed" in capsys.readouterr().out


def test_sequences_that_see_each_other(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leak(monkeypatch)
    found = check_packed(llama, dtype=torch.float64)
    assert found.alone > 0.01 and not found.sound
    assert main(["check", "--model", str(llama)]) == 1
    assert "cannot be trained packed" in capsys.readouterr().out
    with pytest.raises(ModelError, match="what it gives each of them alone"):
        FSDPEngine(
            llama,
            model=BackboneConfig(path=str(llama)),
            fsdp=FSDPConfig(),
            optim=None,
            total_steps=1,
            device=torch.device("cpu"),
        )


def test_positions_that_count_through(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(packing.Packing):
        def __init__(self, lengths: list[int], device: torch.device, split: None = None) -> None:
            super().__init__(lengths, device, split)
            self.position_ids = 7 * self.position_ids

    monkeypatch.setattr(packing, "Packing", Wrong)
    found = check_packed(llama, dtype=torch.float64)
    assert found.alone < 1e-12 and found.reference > 0.01 and not found.sound


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
