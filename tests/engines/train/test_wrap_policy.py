"""FSDP units follow the wrap policy, and training does not depend on them."""

import pytest
import synthetic
import torch
import wrap_job
from wrap_job import KEPT, LAYER, LEAST, NAMES, POLICIES

from tandem.config.fsdp import FSDPConfig
from tandem.engines.rollout.borrowed import borrowed
from tandem.engines.rollout.native.fused import why_not_fused
from tandem.errors import ConfigError
from tests.support.ranks import run_ranks

RANKS = 1e-9  # sums over ranks are added in another order


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return synthetic.save_model(tmp_path_factory.mktemp("untied"), **wrap_job.SHAPE)


@pytest.fixture(scope="module", params=["core", pytest.param("all", marks=pytest.mark.slow)])
def pair(untied, tmp_path_factory, request):
    results = tmp_path_factory.mktemp("pair") / "record.pt"
    run_ranks(wrap_job.__file__, untied, results, request.param)
    return torch.load(results, weights_only=False)


@pytest.fixture(scope="module")
def alone(untied):
    engine = wrap_job.engine_with(untied, {}, "kept")
    return *wrap_job.trained(engine, synthetic.make_batch()), wrap_job.lent(engine)


@pytest.mark.slow
def test_two_ranks_train_as_one_does(alone, pair):
    weights, log_probs, lent = alone
    assert {name for name, _ in pair} == set(POLICIES) and {kept for _, kept in pair} == set(KEPT)
    for (name, kept), found in pair.items():
        assert found["units"] == POLICIES[name][1], (name, kept)
        assert synthetic.relative_difference(found["weights"], weights) <= RANKS, (name, kept)
        assert torch.allclose(found["log_probs"], log_probs, rtol=0, atol=1e-8), (name, kept)
        assert torch.allclose(found["lent"], lent, rtol=0, atol=1e-8), (name, kept)
        assert found["sharded again"], (name, kept)


def test_units_of_one_rank(untied):
    """Modules that share a unit have the same FSDP state."""

    def states(policy):
        engine = wrap_job.engine_with(untied, policy, "again")
        layers = engine.module.decoder.layers
        assert len(engine._units) == 1 + len({id(unit._get_fsdp_state()) for unit in engine._units[:-1]})
        return [id(layer._get_fsdp_state()) for layer in layers]

    apart = states({})
    assert len(set(apart)) == wrap_job.LAYERS
    first, second, *rest = states({LEAST: LAYER + 1})
    assert first == second and len(set(rest)) == 1 and first not in rest


@pytest.mark.parametrize("name", ["linear maps", "more than a layer", "layers and embedding"])
def test_a_fused_rollout_takes_the_module_as_before(untied, name):
    engine = wrap_job.engine_with(untied, POLICIES[name][0], "again")
    with engine.unsharded() as module:
        assert why_not_fused(module) is None


@pytest.mark.parametrize("name", ["layers", "more than a layer"])
def test_a_borrowed_module_runs_without_fsdps_hooks(untied, name):
    """Modules that share a unit have other hooks than a module with its own unit."""
    engine = wrap_job.engine_with(untied, POLICIES[name][0], "again")

    def hooks():
        layers = engine.module.decoder.layers
        return [dict(table) for layer in layers for table in (layer._forward_pre_hooks, layer._forward_hooks)]

    before = hooks()
    assert all(before)
    with engine.unsharded() as module, borrowed(module, "sdpa"):
        assert not any(hooks())
        module(torch.arange(9)[None], use_cache=False)
    assert hooks() == before


def refused(folder, policy, **options):
    with pytest.raises(ConfigError) as caught:
        synthetic.make_engine(folder, fsdp={"wrap_policy": policy}, **options)
    return caught.value


def test_an_unknown_class_is_refused_with_the_models_own(untied):
    error = refused(untied, {NAMES: ("Qwen2DecoderLayers",)})
    assert error.field == "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap"
    assert error.got == "Qwen2DecoderLayers"
    assert error.expected == "Embedding, Linear, Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP, Qwen2Model, " \
        "Qwen2RMSNorm"  # fmt: skip
    assert error.remedy == "did you mean Qwen2DecoderLayer?"


def test_a_tied_embedding_is_no_unit_and_nothing_that_holds_it(folder):
    for name in ("Embedding", "Qwen2Model"):
        error = refused(folder, {NAMES: (name,)})
        assert error.got == name and name not in error.expected.split(", ")
    engine = synthetic.make_engine(folder, kind="value", fsdp={"wrap_policy": {NAMES: ("Embedding",)}})
    assert len(engine._units) == 2  # a value model has no head that shares the embedding


def test_units_inside_units_are_not_counted_together(untied):
    error = refused(untied, {NAMES: ("Qwen2DecoderLayer", "Qwen2MLP"), LEAST: 10})
    assert error.got == "Qwen2DecoderLayer, Qwen2MLP" and "min_num_params=0" in error.remedy


def test_names_may_be_one_text_or_null():
    assert FSDPConfig(wrap_policy={NAMES: "Qwen2DecoderLayer"}).wrap_policy.transformer_layer_cls_to_wrap == (
        "Qwen2DecoderLayer",
    )
    assert FSDPConfig(wrap_policy={NAMES: None}).wrap_policy.transformer_layer_cls_to_wrap == ()
