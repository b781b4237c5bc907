"""Weights that are read row by row into shards equal those of transformers, bit for bit.

Folders that cannot be read this way are loaded by transformers.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train.fsdp import FSDPEngine
from tandem.engines.train.module import Settings, unsharded_module
from tandem.errors import ModelError
from tandem.models.loading import load_policy
from tandem.models.weight_files import WeightFiles
from tests.models.conftest import SHAPE

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def engine(folder, kind="policy", precision="fp32"):
    return FSDPEngine(
        folder,
        kind=kind,
        model=BackboneConfig(path=str(folder)),
        fsdp=FSDPConfig(model_dtype=precision, dtype=precision),
        optim=None,
        total_steps=1,
        device=torch.device("cpu"),
    )


def loaded_otherwise(monkeypatch, *args):
    with monkeypatch.context() as patch:
        patch.setattr(WeightFiles, "find", classmethod(lambda cls, folder: None))
        return engine(*args)


def assert_same_module(first, second):
    for kind in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(first, kind)(), getattr(second, kind)(), strict=True)
        for (name, value), (other, wanted) in pairs:
            value, wanted = (getattr(v, "_local_tensor", v) for v in (value, wanted))
            assert name == other and value.dtype == wanted.dtype and value.device == wanted.device
            assert torch.equal(value, wanted), name


@pytest.fixture
def folder(qwen2_folder, tmp_path):
    return shutil.copytree(qwen2_folder, tmp_path / "model")


@pytest.fixture
def read_in_rows(monkeypatch):
    """Return the list of modules that are filled from files."""
    filled = []
    fill = WeightFiles.fill
    monkeypatch.setattr(WeightFiles, "fill", lambda self, *args: (filled.append(args[0]), fill(self, *args)))
    return filled


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_the_same_bits_as_transformers(model_folder, kind, precision, read_in_rows, monkeypatch):
    found = engine(model_folder, kind, precision)
    assert read_in_rows == [found.module]
    wanted = loaded_otherwise(monkeypatch, model_folder, kind, precision)
    assert len(read_in_rows) == 1
    assert_same_module(found.module, wanted.module)
    if kind == "policy":
        stored = AutoModelForCausalLM.from_pretrained(model_folder, dtype=DTYPES[precision])
        assert all(torch.equal(dict(found.weights())[n], p) for n, p in stored.named_parameters())
        inv_freq = stored.model.rotary_emb.inv_freq
        assert torch.equal(found.module.decoder.rotary_emb.inv_freq, inv_freq)
    else:
        assert dict(found.weights())["value_head.weight"].abs().max() == 0


def test_a_reward_model(tmp_path, read_in_rows, monkeypatch):
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, head_dim=16, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    found = engine(tmp_path, "score")
    assert len(read_in_rows) == 1 and not found.module.model.training
    assert_same_module(found.module, loaded_otherwise(monkeypatch, tmp_path, "score").module)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_several_files_in_another_type(folder, stored, read_in_rows, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=stored)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    found = engine(folder)
    assert len(read_in_rows) == 1
    weights = dict(found.weights())
    assert all(torch.equal(weights[name], p.float()) for name, p in model.named_parameters())
    assert_same_module(found.module, loaded_otherwise(monkeypatch, folder).module)


def test_parameters_have_no_memory_until_they_are_sharded(folder):
    settings = Settings(BackboneConfig(path=str(folder)), FSDPConfig(), OptimConfig(), torch.device("cpu"))
    module, files = unsharded_module("policy", folder, settings, temperature=1.0)
    assert files is not None
    assert all(p.is_meta and p.requires_grad for p in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())


def test_other_folders_are_loaded_as_ever(folder, read_in_rows):
    weights = dict(engine(folder).weights())
    assert len(read_in_rows) == 1
    stored = load_file(folder / "model.safetensors")
    twice = stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(twice, folder / "model.safetensors", metadata={"format": "pt"})
    assert all(torch.equal(value, weights[name]) for name, value in engine(folder).weights())
    (folder / "model.safetensors").unlink()
    torch.save(twice, folder / "pytorch_model.bin")
    assert all(torch.equal(value, weights[name]) for name, value in engine(folder).weights())
    assert len(read_in_rows) == 1


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def without(name, path):
    stored = load_file(path)
    del stored[name]
    save_file(stored, path, metadata={"format": "pt"})


TROUBLE = {
    "cannot be loaded": truncated,
    r"model\.layers\.1\.mlp\.up_proj\.weight": lambda p: without("model.layers.1.mlp.up_proj.weight", p),
    r"model\.embed_tokens\.weight|lm_head\.weight": lambda p: without("model.embed_tokens.weight", p),
    "contains no weights": lambda p: p.unlink(),
}


@pytest.mark.parametrize("telling", TROUBLE)
def test_trouble_is_told_as_ever(folder, telling, read_in_rows):
    TROUBLE[telling](folder / "model.safetensors")
    with pytest.raises(ModelError, match=telling) as from_engine:
        engine(folder)
    with pytest.raises(ModelError, match=telling) as plain:
        load_policy(folder)
    assert str(from_engine.value) == str(plain.value)
    assert read_in_rows == []


def test_a_shape_that_differs_and_an_index_that_lies(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ModelError):
        engine(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        engine(folder)
