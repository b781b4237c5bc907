"""FSDP units follow the wrap policy, and training does not depend on them."""

import itertools

import pytest
import torch

from tandem.config.fsdp import FSDPConfig
from tandem.engines.rollout.borrowed import borrowed
from tandem.engines.rollout.native.fused import why_not_fused
from tandem.errors import ConfigError
from tests.engines.train import synthetic
from tests.engines.train.on_ranks import gathered, on_ranks, seven_or_three

LAYERS = 5
SHAPE = {"num_hidden_layers": LAYERS, "tie_word_embeddings": False}
LAYER = 32 * (32 + 1) + 2 * 16 * (32 + 1) + 32 * 32 + 3 * 32 * 48 + 2 * 32  # numbers in a layer
MLP = 3 * 32 * 48

NAMES, LEAST = "transformer_layer_cls_to_wrap", "min_num_params"
# The policy, and the number of units it makes besides the root.
POLICIES = {
    "layers": ({}, LAYERS),
    "exactly a layer": ({LEAST: LAYER}, LAYERS),
    "more than a layer": ({LEAST: LAYER + 1}, 2),
    "as many as all": ({LEAST: LAYERS * LAYER}, 1),
    "more than all": ({LEAST: LAYERS * LAYER + 1}, 0),
    "layers and embedding": ({NAMES: ("Qwen2DecoderLayer", "Embedding")}, LAYERS + 1),
    "embedding with a layer": ({NAMES: ("Qwen2DecoderLayer", "Embedding"), LEAST: LAYER}, LAYERS),
    "within layers": ({NAMES: ("Qwen2Attention", "Qwen2MLP")}, 2 * LAYERS),
    "inside each other": ({NAMES: ("Qwen2DecoderLayer", "Qwen2MLP")}, 2 * LAYERS),
    "shared across layers": ({NAMES: ("Qwen2MLP",), LEAST: 2 * MLP}, 2),
    "linear maps": ({NAMES: ("Linear",)}, 7 * LAYERS),
    "the decoder": ({NAMES: ("Qwen2Model", "Qwen2DecoderLayer")}, LAYERS + 1),
}


def engine_with(folder, name, kept="full", **fsdp):
    keys = {"wrap_policy": POLICIES[name][0], "forward_prefetch": kept == "none", **fsdp}
    return synthetic.engine_keeping(folder, kept, fsdp=keys)


def trained(folder, name, kept):
    """Return weights and log-probs after two steps, and what a rollout sees that borrows the module."""
    engine, batch = engine_with(folder, name, kept), seven_or_three(synthetic.make_batch())
    synthetic.train(engine, batch, steps=2)
    log_probs = torch.cat(gathered(synthetic.output(engine, batch).values))
    outputs = {"log_probs": log_probs, "lent": synthetic.borrowed_logits(engine)}
    sharded = all(value.to_local().numel() < value.numel() for value in engine.module.parameters())
    return synthetic.weights(engine), outputs, sharded


def in_each_way(folder, ways):
    return {way: trained(folder, *way) for way in ways}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return synthetic.save_model(tmp_path_factory.mktemp("untied"), **SHAPE)


@pytest.mark.slow
def test_two_ranks_train_as_one_does(untied):
    weights, outputs, _ = trained(untied, "layers", "none")
    for record in on_ranks(in_each_way, untied, list(itertools.product(POLICIES, ("full", "none")))):
        for way, (found, also, sharded_again) in record.items():
            assert synthetic.relative_difference(found, weights) <= 1e-9, way
            for part, wanted in outputs.items():
                assert torch.allclose(also[part], wanted, rtol=0, atol=1e-8), (way, part)
            assert sharded_again, way


@pytest.mark.parametrize("name", POLICIES)
def test_units(untied, name):
    """Modules that share a unit have the same FSDP state."""
    engine = engine_with(untied, name)
    states = {id(unit._get_fsdp_state()) for unit in engine._units[:-1]}
    assert len(engine._units) - 1 == len(states) == POLICIES[name][1]
    if name in ("layers", "more than a layer"):
        first, second, *rest = (id(layer._get_fsdp_state()) for layer in engine.module.decoder.layers)
        assert (first == second, len({first, second, *rest})) == ((False, LAYERS), (True, 2))[
            name != "layers"
        ]


@pytest.mark.parametrize("name", ["linear maps", "more than a layer", "layers and embedding"])
def test_a_fused_rollout_takes_the_module_as_before(untied, name):
    with engine_with(untied, name).unsharded() as module:
        assert why_not_fused(module) is None


@pytest.mark.parametrize("name", ["layers", "more than a layer"])
def test_a_borrowed_module_runs_without_fsdps_hooks(untied, name):
    engine = engine_with(untied, name)

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
    assert (error.field, error.got) == (f"fsdp_config.wrap_policy.{NAMES}", "Qwen2DecoderLayers")
    own = "Embedding Linear Qwen2Attention Qwen2DecoderLayer Qwen2MLP Qwen2Model Qwen2RMSNorm"
    assert error.expected.split(", ") == own.split() and "Qwen2DecoderLayer?" in error.remedy


def test_a_tied_embedding_is_no_unit_and_nothing_that_holds_it(folder):
    for name in ("Embedding", "Qwen2Model"):
        error = refused(folder, {NAMES: (name,)})
        assert error.got == name and name not in error.expected.split(", ")
    engine = synthetic.make_engine(folder, kind="value", fsdp={"wrap_policy": {NAMES: ("Embedding",)}})
    assert len(engine._units) == 2  # a value model has no head that shares the embedding


def test_units_inside_units_are_not_counted_together(untied):
    error = refused(untied, {NAMES: ("Qwen2DecoderLayer", "Qwen2MLP"), LEAST: 10})
    assert error.got == "Qwen2DecoderLayer, Qwen2MLP" and "min_num_params=0" in error.remedy


@pytest.mark.parametrize(("given", "names"), [("Qwen2DecoderLayer", ("Qwen2DecoderLayer",)), (None, ())])
def test_names_may_be_one_text_or_null(given, names):
    assert FSDPConfig(wrap_policy={NAMES: given}).wrap_policy.transformer_layer_cls_to_wrap == names
