"""Adapters in the training engine.

One rank is compared with weights merged by hand, and two ranks with one.
"""

from pathlib import Path

import lora_models
import pytest
import synthetic
import torch
from synthetic import CUTS, SyntheticLoss, make_engine
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
from tests.support.ranks import run_ranks

JOB = Path(__file__).with_name("lora_job.py")
ONE = ("policy", 1, -1, 1)


@pytest.fixture(scope="module")
def trained(folder):
    """Return an engine of one rank after two steps. Its base model is the folder's."""
    engine = lora_models.engine_of(folder, *ONE, {})
    lora_models.train(engine, lora_models.batch(), "policy", steps=2)
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
    engine = lora_models.engine_of(folder, *ONE, {})
    before = {name: p.full_tensor().clone() for name, p in engine.module.named_parameters()}
    taken = {}

    def take(lr, grad_norm, clip_grad):
        taken.update({name: p.grad is not None for name, p in engine.module.named_parameters()})

    engine._state.step, kept = take, engine._state.step
    engine.train_step(lora_models.batch(), SyntheticLoss(), micro=CUTS["three"])
    engine._state.step = kept
    assert {name for name, has in taken.items() if has} == {name for name in taken if lora.is_adapter(name)}
    lora_models.train(engine, lora_models.batch(), "policy")
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name]) != lora.is_adapter(name), name


def test_merged_weights_compute_what_the_adapters_do(folder, trained):
    """Merged weights equal those merged here by hand, and a plain engine with them computes the same."""
    named = dict(trained.module.named_parameters())
    merged = synthetic.weights(trained)
    assert merged.keys() == synthetic.weights(make_engine(folder)).keys() == trained.weight_shapes.keys()
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
    outputs = frozenset({"log_probs", "entropy"})
    first, second = (
        engine.forward(lora_models.batch(), outputs=outputs, micro=CUTS["three"])
        for engine in (trained, plain)
    )
    for name in outputs:
        assert torch.allclose(first.ragged(name).values, second.ragged(name).values, rtol=0, atol=1e-9)


@pytest.mark.parametrize("fsdp_keys", [{}, {"model_dtype": "fp32", "dtype": "bf16"}])
def test_without_the_adapter_it_is_the_base_bit_for_bit(folder, fsdp_keys):
    adapted, base = (
        make_engine(folder, model={"lora_rank": rank}, fsdp=fsdp_keys, precision="fp32") for rank in (4, 0)
    )
    batch = synthetic.make_batch(torch.float32)
    for _ in range(2):
        adapted.train_step(batch, SyntheticLoss(), micro=CUTS["three"])
    outputs = frozenset({"log_probs", "entropy"})
    off = adapted.forward(batch, outputs=outputs, micro=CUTS["three"], adapter=False)
    on = adapted.forward(batch, outputs=outputs, micro=CUTS["three"])
    plain = base.forward(batch, outputs=outputs, micro=CUTS["three"])
    for name in outputs:
        assert torch.equal(off.ragged(name).values, plain.ragged(name).values)
        assert not torch.equal(on.ragged(name).values, plain.ragged(name).values)
    adapted.train_step(batch, SyntheticLoss(), micro=CUTS["three"])  # the adapters are on again


def test_bf16_trains_fp32_adapters(folder):
    exact = lora_models.engine_of(folder, *ONE, {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora_models.SEED)
        half = make_engine(folder, model=lora_models.KEYS, fsdp={"model_dtype": "fp32", "dtype": "bf16"})
    wanted = exact.train_step(lora_models.batch(), SyntheticLoss(), micro=CUTS["three"]).to_floats()
    found = half.train_step(
        synthetic.make_batch(torch.float32), SyntheticLoss(), micro=CUTS["three"]
    ).to_floats()
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
        trained.load_weights(synthetic.weights(trained).items(), 3)


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


def test_a_checkpoint_goes_on_with_the_same_step(folder, saved):
    first, second = (lora_models.engine_of(folder, *ONE, {}) for _ in range(2))
    first.load(saved)
    assert first.version == 2
    lora_models.train(second, lora_models.batch(), "policy", steps=2)
    after = [
        lora_models.train(engine, lora_models.batch(), "policy", steps=2)[0] for engine in (first, second)
    ]
    assert after[0] == after[1]
    assert first.digest() == second.digest()
    for name, value in lora_models.adapters(first).items():
        assert torch.equal(value, lora_models.adapters(second)[name])


REFUSED = {
    "another base": ({}, "model.layers.0.mlp.up_proj.weight", "1 of "),
    "another scale": ({"lora_alpha": 3}, "model.lora_alpha", "lora_alpha / lora_rank = 2"),
    "fewer layers": (
        {"target_modules": ("q_proj",)},
        "model.target_modules",
        "0 tensors are missing, 36 are not expected and 0 have the wrong shape",
    ),
    "another rank": (
        {"lora_rank": 4, "lora_alpha": 8},
        "model.target_modules",
        "0 tensors are missing, 0 are not expected and 42 have the wrong shape",
    ),
    "no adapters": (
        {"lora_rank": 0},
        None,
        "Missing key in checkpoint state_dict: model.model.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_others_is_refused_and_changes_nothing(folder, saved, tmp_path, case):
    keys, field, got = REFUSED[case]
    if case == "another base":
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[1, 2] += 0.1
        model.save_pretrained(tmp_path)
        folder = tmp_path
    engine = lora_models.engine_of(folder, *ONE, keys)
    before = engine.digest(), lora_models.adapters(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load(saved)
    assert caught.value.field == field and got in caught.value.got
    assert engine.digest() == before[0] and engine.version == 0


def test_a_checkpoint_of_all_weights_is_refused(folder, tmp_path):
    make_engine(folder).save(tmp_path)
    with pytest.raises(CheckpointError, match="without adapters") as caught:
        lora_models.engine_of(folder, *ONE, {}).load(tmp_path)
    assert caught.value.field == "model.lora_rank"


def test_a_folder_that_is_not_read_piece_by_piece_gives_the_same(folder, tmp_path):
    """With a pytorch_model.bin, the adapters join a model that already has its weights."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    found, wanted = (lora_models.engine_of(path, *ONE, {}) for path in (tmp_path, folder))
    assert lora_models.adapters(found).keys() == lora_models.adapters(wanted).keys()
    for name, value in lora_models.adapters(wanted).items():
        assert torch.equal(lora_models.adapters(found)[name], value)
    first, second = (
        lora_models.train(engine, lora_models.batch(), "policy", steps=1) for engine in (found, wanted)
    )
    assert first[0] == second[0]


@pytest.mark.parametrize("kind", ["value", "score"])
def test_a_head_of_ours_learns_whole(folder, scorer_folder, kind):
    path = scorer_folder if kind == "score" else folder
    engine = lora_models.engine_of(path, kind, 1, -1, 1, {})
    head = [name for name in lora_models.adapters(engine) if not lora.is_adapter(name)]
    assert head == (["score.weight"] if kind == "score" else ["value_head.weight", "value_head.bias"])


@pytest.mark.parametrize("optimizer", ["muon", "adamw_cpu"])
def test_other_optimizers_train_adapters(folder, optimizer):
    engine = make_engine(folder, model=lora_models.KEYS, optim={"optimizer": optimizer})
    losses = [metrics["loss"] for metrics in lora_models.train(engine, lora_models.batch(), "policy")[0]]
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
    model = BackboneConfig(path=str(folder), **lora_models.KEYS)
    settings = Settings(model, FSDPConfig(dtype="bf16"), OptimConfig(), torch.device("cpu"))
    module, files = unsharded_module("policy", folder, settings, temperature=1.0)
    assert files is not None
    assert all(parameter.is_meta for parameter in module.parameters())
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad == lora.is_adapter(name)
        assert parameter.dtype == (torch.float32 if lora.is_adapter(name) else torch.bfloat16), name
    assert not any(buffer.is_meta for buffer in module.buffers())


@pytest.fixture(scope="module", params=["core", pytest.param("all", marks=pytest.mark.slow)])
def job(folder, saved, tmp_path_factory, request):
    results = tmp_path_factory.mktemp("lora")
    lora_models.peft_folder(folder, results / "adapter")
    run_ranks(JOB, folder, saved, results, request.param)
    return results, torch.load(results / "record.pt", weights_only=False)


def test_steps_on_two_ranks_equal_one(folder, job):
    for name, found in job[1]["trained"].items():
        _equals_one_rank(folder, name, found)


def _equals_one_rank(folder, name, found):
    kind, _, _, _, keys = lora_models.DIVISIONS[name]
    engine = lora_models.engine_of(folder, kind, 1, -1, 1, keys)
    drawn = lora_models.adapters(engine)
    assert found["drawn"].keys() == drawn.keys(), name
    assert all(torch.equal(found["drawn"][key], value) for key, value in drawn.items()), name
    metrics, forward = lora_models.train(engine, lora_models.batch(), kind)
    for mine, theirs in zip(found["metrics"], metrics, strict=True):
        for key in theirs.keys() & {"loss", "entropy", "grad_norm", "lr", "tokens", "sequences"}:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-9, abs=1e-9), (name, key)
    weights, trained = synthetic.weights(engine), lora_models.adapters(engine)
    assert found["shapes"] == {key: value.shape for key, value in weights.items()}, name
    assert synthetic.relative_difference(found["forward"], forward) <= 1e-9, name
    assert synthetic.relative_difference(found["weights"], weights) <= 1e-9, name
    assert synthetic.relative_difference(found["adapters"], trained) <= 1e-9, name
    info = engine.state_info()
    for key in ("parameters", "trainable_parameters"):
        assert found["info"][key] == info[key], (name, key)
    if name != "copies":
        held, whole = found["info"]["parameters@cpu"], info["parameters@cpu"]
        # More than half: some rows are not divisible by two, and both ranks hold some weights.
        assert whole / 2 <= held <= 0.65 * whole, name


def test_digests_on_two_ranks_are_those_of_the_merged_weights(job):
    for name, found in job[1]["trained"].items():
        assert found["digests"] == [(True, True)] * 2, name
        assert found["same base"] == [True, True], name
        assert found["unshards"] is False, name


def test_checkpoints_go_from_one_division_to_another(folder, saved, job):
    results, record = job
    engine = lora_models.engine_of(folder, *ONE, {})
    engine.load(saved)
    lora_models.train(engine, lora_models.batch(), "policy", steps=1)
    wanted = lora_models.adapters(engine)
    for name, (version, found) in record["resumed"].items():
        assert version == 3
        assert synthetic.relative_difference(found, wanted) <= 1e-9, name
        again = lora_models.engine_of(folder, *ONE, {})
        again.load(results / name)
        lora_models.train(again, lora_models.batch(), "policy", steps=1)
        assert synthetic.relative_difference(lora_models.adapters(again), wanted) <= 1e-9, name


def test_adapters_of_peft_are_where_training_starts(folder, job):
    results, record = job
    wanted = {
        name: p.detach() for name, p in lora_models.peft_folder(folder, results / "same").named_parameters()
    }
    engine = lora_models.engine_of(folder, *ONE, {"lora_adapter_path": str(results / "adapter")})
    for found in (synthetic.weights(engine), *record["started"].values()):
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[name].float(), p, rtol=0, atol=1e-6) for name, p in wanted.items())
    lora_models.train(engine, lora_models.batch(), "policy", steps=1)
