"""Weights that are read row by row into shards equal those of transformers, which loads all other folders."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train.module import Settings, unsharded_module
from tandem.errors import ModelError
from tandem.models import lora
from tandem.models.weight_files import WeightFiles
from tests.models.small import CPU, SHAPE, make_engine, save

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
WEIGHTS = "model.safetensors"


@pytest.fixture
def read_in_rows(monkeypatch):
    """Return the list of modules that are filled from files."""
    filled, fill = [], WeightFiles.fill
    monkeypatch.setattr(WeightFiles, "fill", lambda self, *args: (filled.append(args[0]), fill(self, *args)))
    return filled


def assert_as_loaded_otherwise(found, read_in_rows, monkeypatch, *args):
    """Compare an engine whose weights were read in rows with one that transformers loads."""
    assert read_in_rows == [found.module]
    with monkeypatch.context() as patch:
        patch.setattr(WeightFiles, "find", classmethod(lambda cls, folder: None))
        wanted = make_engine(*args)
    assert len(read_in_rows) == 1
    for kind in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(found.module, kind)(), getattr(wanted.module, kind)(), strict=True)
        for (name, value), (other, want) in pairs:
            value, want = (getattr(v, "_local_tensor", v) for v in (value, want))
            assert (name, value.dtype, value.device) == (other, want.dtype, want.device)
            assert torch.equal(value, want), name


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_the_same_bits_as_transformers(model_folder, kind, precision, read_in_rows, monkeypatch):
    found = make_engine(model_folder, kind, precision)
    assert_as_loaded_otherwise(found, read_in_rows, monkeypatch, model_folder, kind, precision)
    weights = dict(found.weights())
    if kind == "value":
        assert weights["value_head.weight"].abs().max() == 0
        return
    stored = AutoModelForCausalLM.from_pretrained(model_folder, dtype=DTYPES[precision])
    assert all(torch.equal(weights[name], p) for name, p in stored.named_parameters())
    assert torch.equal(found.module.decoder.rotary_emb.inv_freq, stored.model.rotary_emb.inv_freq)


def test_a_reward_model(tmp_path, read_in_rows, monkeypatch):
    save(Qwen3Config(**SHAPE, head_dim=16, num_labels=1), tmp_path, scorer=True)
    found = make_engine(tmp_path, "score")
    assert not found.module.model.training
    assert_as_loaded_otherwise(found, read_in_rows, monkeypatch, tmp_path, "score")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_several_files_in_another_type(folder, stored, read_in_rows, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=stored)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    found = make_engine(folder)
    weights = dict(found.weights())
    assert all(torch.equal(weights[name], p.float()) for name, p in model.named_parameters())
    assert_as_loaded_otherwise(found, read_in_rows, monkeypatch, folder)


@pytest.mark.parametrize("keys", [{}, {"lora_rank": 3}])
def test_parameters_have_no_memory_until_they_are_sharded(folder, keys):
    settings = Settings(
        BackboneConfig(path=str(folder), **keys), FSDPConfig(dtype="bf16"), OptimConfig(), CPU
    )
    module, files = unsharded_module("policy", folder, settings, temperature=1.0)
    assert files is not None and not any(buffer.is_meta for buffer in module.buffers())
    for name, parameter in module.named_parameters():
        learns = not keys or lora.is_adapter(name)
        assert (parameter.is_meta, parameter.requires_grad) == (True, learns)
        assert parameter.dtype == (torch.float32 if learns else torch.bfloat16), name


def test_other_folders_are_loaded_as_ever(folder, read_in_rows):
    weights, stored = dict(make_engine(folder).weights()), load_file(folder / WEIGHTS)
    twice = stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(twice, folder / WEIGHTS, metadata={"format": "pt"})
    assert all(torch.equal(value, weights[name]) for name, value in make_engine(folder).weights())
    (folder / WEIGHTS).unlink()
    torch.save(twice, folder / "pytorch_model.bin")
    assert all(torch.equal(value, weights[name]) for name, value in make_engine(folder).weights())
    assert len(read_in_rows) == 1


def test_an_index_that_lies(folder):
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        make_engine(folder)
