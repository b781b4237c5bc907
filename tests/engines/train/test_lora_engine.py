"""Adapters in the training engine, compared with weights merged by hand."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.checkpoint.weights import read_weights
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train import fsdp
from tandem.engines.train.fsdp import FSDPEngine
from tandem.engines.train.module import Settings, unsharded_module
from tandem.engines.weight_sync import digest
from tandem.errors import CheckpointError, ConfigError, EngineError
from tandem.models import lora
from tests.engines.train import matrix, synthetic
from tests.engines.train.matrix import adapters
from tests.engines.train.models import ADAPTERS, peft_folder
from tests.engines.train.on_ranks import on_ranks
from tests.engines.train.synthetic import make_engine, output, same, train, weights

BATCH = synthetic.make_batch()


def engine_of(folder, *parts, **keys):
    """Return an engine with adapters; keys are those of the model."""
    return matrix.engine_of(folder, {"of": "", "model": {**ADAPTERS, **keys}}, *parts)


@pytest.fixture(scope="module")
def trained(folder):
    """Return an engine of one rank after two steps. Its base model is the folder's."""
    engine = engine_of(folder)
    train(engine, BATCH, steps=2)
    return engine


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "state"
    trained.save(path)
    return path


def test_only_adapters_are_trained_and_counted(folder, trained):
    info = trained.state_info()
    per_layer = sum(3 * (i + o) for i, o in [(32, 32)] * 2 + [(32, 16)] * 2 + [(32, 48)] * 2 + [(48, 32)])
    assert info["trainable_parameters"] == 3 * per_layer
    assert info["parameters"] == make_engine(folder).state_info()["parameters"] + 3 * per_layer
    tensors = 3 * 7 * 2
    # Two fp64 moments per number, and a counter per tensor.
    assert info["optimizer@cpu"] == 2 * 8 * 3 * per_layer + 4 * tensors
    names = {name for name, p in trained.module.named_parameters() if p.requires_grad}
    assert len(names) == tensors and all(map(lora.is_adapter, names))


def test_gradients_reach_adapters_alone_and_the_base_stays(folder):
    engine = engine_of(folder)
    before = {name: p.full_tensor().clone() for name, p in engine.module.named_parameters()}
    taken, step = {}, engine._state.step

    def take(*arguments):
        taken.update({name: p.grad is not None for name, p in engine.module.named_parameters()})
        step(*arguments)

    engine._state.step = take
    train(engine, BATCH, steps=2)
    assert {name for name, has in taken.items() if has} == {name for name in taken if lora.is_adapter(name)}
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name]) != lora.is_adapter(name), name


def test_merged_weights_compute_what_the_adapters_do(folder, trained):
    """Merged weights equal those merged here by hand, and a plain engine with them computes the same."""
    named = dict(trained.module.named_parameters())
    merged = weights(trained)
    assert merged.keys() == weights(make_engine(folder)).keys() == trained.weight_shapes.keys()
    changed = 0
    for name, parameter in named.items():
        if lora.is_adapter(name):
            continue
        wanted, stem = parameter.full_tensor(), name.removesuffix("base_layer.weight")
        if stem != name:
            a, b = (named[f"{stem}lora_{x}.default.weight"].full_tensor() for x in "AB")
            wanted, changed = wanted + 2.0 * (b @ a), changed + 1
        plain_name = name.removeprefix("model.").replace(".base_layer", "")
        assert torch.allclose(merged[plain_name], wanted, rtol=0, atol=1e-14), name
    assert changed == 3 * 7
    plain = make_engine(folder)
    plain.load_weights(merged.items(), 2)
    assert trained.digest() == plain.digest() == digest(merged.items())
    assert trained.digest(torch.bfloat16) == digest(trained.weights(dtype=torch.bfloat16))
    for name in ("log_probs", "entropy"):
        first, second = (output(engine, BATCH, name).values for engine in (trained, plain))
        assert torch.allclose(first, second, rtol=0, atol=1e-9)


@pytest.mark.parametrize("fsdp_keys", [{}, {"model_dtype": "fp32", "dtype": "bf16"}])
def test_without_the_adapter_it_is_the_base_bit_for_bit(folder, fsdp_keys):
    adapted, base = (
        make_engine(folder, model={"lora_rank": rank}, fsdp=fsdp_keys, precision="fp32") for rank in (4, 0)
    )
    batch = synthetic.make_batch(torch.float32)
    train(adapted, batch, steps=2)
    for name in ("log_probs", "entropy"):
        plain = output(base, batch, name).values
        assert torch.equal(output(adapted, batch, name, adapter=False).values, plain)
        assert not torch.equal(output(adapted, batch, name).values, plain)
    train(adapted, batch)  # the adapters are on again


def test_bf16_trains_fp32_adapters(folder):
    exact = engine_of(folder)
    half = engine_of(folder, {"fsdp": matrix.MIXED})
    (wanted,), (found,) = train(exact, BATCH), train(half, synthetic.make_batch(torch.float32))
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)
    for name, p in half.module.named_parameters():  # frozen weights have the compute type
        assert p.dtype == (torch.float32 if lora.is_adapter(name) else torch.bfloat16)
    info = half.state_info()
    learns = info["trainable_parameters"]
    assert info["parameters@cpu"] == 4 * learns + 2 * (info["parameters"] - learns)
    merged = dict(half.weights())
    assert all(value.dtype == torch.float32 for value in merged.values())
    assert half.digest() == digest(half.weights(dtype=torch.bfloat16))


def test_a_module_with_adapters_is_not_shared_nor_overwritten(trained):
    assert trained.unshards is False
    with pytest.raises(EngineError, match="stream of weights"), trained.unsharded():
        pass
    with pytest.raises(EngineError, match=r"model\.lora_rank"):
        trained.load_weights(weights(trained).items(), 3)


def test_a_checkpoint_holds_adapters_alone(tmp_path):
    large = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    folder = synthetic.save_model(tmp_path / "model", **large)
    sizes = {}
    for rank in (0, 4):
        engine = make_engine(folder, precision="fp32", model={"lora_rank": rank})
        engine.save(tmp_path / str(rank))
        sizes[rank] = sum(file.stat().st_size for file in (tmp_path / str(rank)).rglob("*"))
        learns = engine.state_info()["trainable_parameters"]
        assert 12 * learns < sizes[rank] < 12 * learns + 3e5, rank  # weights and two moments
    assert sizes[4] < 0.05 * sizes[0]
    kept = {name for name, _ in read_weights(tmp_path / "4")}
    assert len(kept) == 2 * 7 * 2 and all(map(lora.is_adapter, kept))


REFUSED = {  # keys of the model, field and part of the value
    "another base": ({}, "model.layers.0.mlp.up_proj.weight", "1 of "),
    "another scale": ({"lora_alpha": 3}, "model.lora_alpha", "lora_alpha / lora_rank = 2"),
    "fewer layers": ({"target_modules": ("q_proj",)}, "model.target_modules", "0 tensors are missing, 36 "),
    "another rank": ({"lora_rank": 4, "lora_alpha": 8}, "model.target_modules", "42 have the wrong shape"),
    "no adapters": ({"lora_rank": 0}, None, "model.model.embed_tokens.weight"),
}


def test_a_checkpoint_of_all_weights_is_refused(folder, tmp_path):
    make_engine(folder).save(tmp_path)
    with pytest.raises(CheckpointError, match="without adapters") as caught:
        engine_of(folder).load(tmp_path)
    assert caught.value.field == "model.lora_rank"


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_others_is_refused_and_changes_nothing(folder, saved, tmp_path, case):
    keys, field, got = REFUSED[case]
    if case == "another base":
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[1, 2] += 0.1
        model.save_pretrained(tmp_path)
        folder = tmp_path
    engine = engine_of(folder, **keys)
    before = engine.digest()
    with pytest.raises(CheckpointError) as caught:
        engine.load(saved)
    assert caught.value.field == field and got in caught.value.got
    assert engine.digest() == before and engine.version == 0


def test_a_folder_that_is_not_read_piece_by_piece_gives_the_same(folder, tmp_path):
    """With a pytorch_model.bin, the adapters join a model that already has its weights."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    found, wanted = (engine_of(path) for path in (tmp_path, folder))
    assert same(adapters(found), adapters(wanted))
    assert train(found, BATCH) == train(wanted, BATCH)


@pytest.mark.parametrize("kind", ["value", "score"])
def test_a_head_of_ours_learns_whole(folder, scorer_folder, kind):
    path = scorer_folder if kind == "score" else folder
    engine = engine_of(path, {"kind": kind, "frozen": False})
    head = [name for name in adapters(engine) if not lora.is_adapter(name)]
    assert head == (["score.weight"] if kind == "score" else ["value_head.weight", "value_head.bias"])


@pytest.mark.parametrize("optimizer", ["muon", "adamw_cpu"])
def test_other_optimizers_train_adapters(folder, optimizer):
    engine = make_engine(folder, model=ADAPTERS, optim={"optimizer": optimizer})
    losses = [metrics["loss"] for metrics in train(engine, BATCH, steps=3)]
    assert losses[-1] < losses[0]


def test_nothing_is_loaded_for_what_is_refused(folder, monkeypatch):
    def loaded(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(fsdp.TrainState, "__init__", loaded)
    monkeypatch.setattr("tandem.models.weight_files.WeightFiles.fill", loaded)
    with pytest.raises(ConfigError, match=r"did you mean q_proj"):
        make_engine(folder, model={"lora_rank": 2, "target_modules": ("q_prj",)})
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    monkeypatch.setattr(FSDPEngine, "_warm_up", loaded)
    with pytest.raises(ConfigError, match="pip install"):
        make_engine(folder, model={"lora_rank": 2})


def test_parameters_have_no_memory_until_they_are_sharded(folder):
    model = BackboneConfig(path=str(folder), **ADAPTERS)
    settings = Settings(model, FSDPConfig(dtype="bf16"), OptimConfig(), torch.device("cpu"))
    module, files = unsharded_module("policy", folder, settings, temperature=1.0)
    assert files is not None
    assert all(parameter.is_meta for parameter in module.parameters())
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad == lora.is_adapter(name)
        assert parameter.dtype == (torch.float32 if lora.is_adapter(name) else torch.bfloat16), name
    assert not any(buffer.is_meta for buffer in module.buffers())


def started(folder, adapter):
    """Return the weights of engines that start from an adapter folder in peft's format, by division."""
    divisions = [matrix.DIVISIONS[name] for name in ("shards", "layers")]
    return [weights(engine_of(folder, divided, lora_adapter_path=adapter)) for divided in divisions]


def test_adapters_of_peft_are_where_training_starts(folder, tmp_path):
    merged = peft_folder(folder, tmp_path)
    wanted = {name: p.detach() for name, p in merged.named_parameters()}
    engine = engine_of(folder, lora_adapter_path=str(tmp_path))
    for found in (weights(engine), *on_ranks(started, folder, str(tmp_path))[0]):
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[name].float(), p, rtol=0, atol=1e-6) for name, p in wanted.items())
    synthetic.train(engine, BATCH)
