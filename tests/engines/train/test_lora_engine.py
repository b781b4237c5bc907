"""Adapters in the training engine, compared with weights merged by hand."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.checkpoint.weights import read_weights
from tandem.engines.train import fsdp
from tandem.engines.train.fsdp import FSDPEngine
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
    trained.save(path := tmp_path_factory.mktemp("saved") / "state")
    return path


def test_only_adapters_are_trained_and_counted(folder, trained):
    info, tensors = trained.state_info(), 3 * 7 * 2
    per_layer = sum(3 * (i + o) for i, o in [(32, 32)] * 2 + [(32, 16)] * 2 + [(32, 48)] * 2 + [(48, 32)])
    assert info["trainable_parameters"] == 3 * per_layer
    assert info["parameters"] == make_engine(folder).state_info()["parameters"] + 3 * per_layer
    # Two fp64 moments per number, and a counter per tensor.
    assert info["optimizer@cpu"] == 2 * 8 * 3 * per_layer + 4 * tensors
    assert sum(p.requires_grad for p in trained.module.parameters()) == tensors


def test_gradients_reach_adapters_alone_and_the_base_stays(folder):
    engine = engine_of(folder)
    before = {name: p.full_tensor().clone() for name, p in engine.module.named_parameters()}
    taken, step = {}, engine._state.step

    def take(*arguments):
        taken.update({name: p.grad is not None for name, p in engine.module.named_parameters()})
        step(*arguments)

    engine._state.step = take
    train(engine, BATCH, steps=2)
    for name, parameter in engine.module.named_parameters():
        learns = lora.is_adapter(name)
        assert (taken[name], not torch.equal(parameter.full_tensor(), before[name])) == (learns, learns), name


def test_merged_weights_compute_what_the_adapters_do(folder, trained):
    """Merged weights equal those merged here by hand, and a plain engine with them computes the same."""
    named, merged, changed = dict(trained.module.named_parameters()), weights(trained), 0
    assert merged.keys() == weights(make_engine(folder)).keys() == trained.weight_shapes.keys()
    for name in [name for name in named if not lora.is_adapter(name)]:
        wanted, stem = named[name].full_tensor(), name.removesuffix("base_layer.weight")
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
    "of all weights": ({}, "model.lora_rank", ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_others_is_refused_and_changes_nothing(folder, saved, tmp_path, case):
    keys, field, got = REFUSED[case]
    if case == "of all weights":
        saved = tmp_path / "whole"
        make_engine(folder).save(saved)
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
    assert caught.value.field == field and got in str(caught.value.got)
    assert engine.digest() == before and engine.version == 0


def test_a_folder_that_is_not_read_piece_by_piece_gives_the_same(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    found, wanted = (engine_of(path) for path in (tmp_path, folder))
    assert same(adapters(found), adapters(wanted)) and train(found, BATCH) == train(wanted, BATCH)


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


def started(folder, adapter):
    """Return the weights of engines that start from an adapter folder in peft's format, by division."""
    divisions = [matrix.DIVISIONS[name] for name in ("shards", "layers")]
    return [weights(engine_of(folder, divided, lora_adapter_path=adapter)) for divided in divisions]


@pytest.mark.slow
def test_adapters_of_peft_are_where_training_starts(folder, tmp_path):
    merged = peft_folder(folder, tmp_path)
    wanted = {name: p.detach() for name, p in merged.named_parameters()}
    engine = engine_of(folder, lora_adapter_path=str(tmp_path))
    for found in (weights(engine), *on_ranks(started, folder, str(tmp_path))[0]):
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[name].float(), p, rtol=0, atol=1e-6) for name, p in wanted.items())
    synthetic.train(engine, BATCH)


def start(folder, adapter):
    return synthetic.make_engine(folder, model={**ADAPTERS, "lora_adapter_path": str(adapter)})


def test_what_changes_nothing_is_no_other_adapter(folder, tmp_path):
    """Dropout, initial values and patterns that repeat the default are accepted."""
    patterns = {"alpha_pattern": {"q_proj": 6}, "rank_pattern": {"o_proj": 3}}
    peft_folder(folder, tmp_path, lora_dropout=0.1, init_lora_weights="gaussian", **patterns)
    start(folder, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("peft_type", "LOHA"), ("of_next_year", {"a": 1}), ("use_qalora", True), ("r", None)]
)
def test_fields_of_an_adapter_that_are_not_applied_are_named(folder, tmp_path, field, value):
    peft_folder(folder, tmp_path)
    file = tmp_path / "adapter_config.json"
    stored = json.loads(file.read_text()) | {field: value}
    if value is None:  # peft's own default, which is 8
        del stored[field]
    file.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=field):
        start(folder, tmp_path)


def test_weights_beside_the_adapters_are_named(folder, tmp_path):
    """Save an enlarged embedding with the adapters, as peft does without a note in its config."""
    peft_folder(folder, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    name = "base_model.model.model.embed_tokens.weight"
    save_file(load_file(file) | {name: torch.zeros(3, 3)}, file)
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight"):
        start(folder, tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": 4}, "r=4"),
        ({"lora_alpha": 5}, "lora_alpha=5"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save=['embed_tokens']"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices=[1, 2]"),
        ({"alpha_pattern": {"q_proj": 32}}, "alpha_pattern={'q_proj': 32}"),
        ({"rank_pattern": {"q_proj": 5}}, "rank_pattern={'q_proj': 5}"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"target_modules": ["q_proj"]}, "down_proj.lora_A.weight is missing"),
        (None, "no adapter"),
    ],
)
def test_other_adapters_are_no_start(folder, tmp_path, changes, said):
    if changes is not None:
        peft_folder(folder, tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"model\.lora_adapter_path") as caught:
        start(folder, tmp_path)
    assert said in str(caught.value)
