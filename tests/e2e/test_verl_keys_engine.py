"""Keys of verl's training engine that are not in the document's command line change what they should."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from tandem.config.explain import explain
from tandem.models.compiled import _forward
from tandem.models.heads import compiled as compiled_head
from tandem.models.policy import PolicyModel
from tests.e2e.keys import ACTOR, REF, responses
from tests.support.runs import same_weights

LAYERS = 2


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("min_num_params=0", LAYERS),
        ("min_num_params=7000", LAYERS),
        ("min_num_params=10000", 1),
        ("min_num_params=100000", 0),
        ("transformer_layer_cls_to_wrap=[Qwen2DecoderLayer]", LAYERS),
        ("transformer_layer_cls_to_wrap=[Qwen2Attention, Qwen2MLP]", 2 * LAYERS),
    ],
)
def test_the_wrap_policy_makes_the_units(shop, base, word, count):
    run = shop.run(f"wrapped_{word}", f"A.fsdp_config.wrap_policy.{word}")
    units = [len(run.actor.engines[role]._units) - 1 for role in ("actor", "ref")]  # besides the root
    assert units == [count, LAYERS]
    assert same_weights(run, base) and responses(run) == responses(base)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("really", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_layers_are_compiled_for_actor_and_reference(shop, base, monkeypatch, really):
    def compiled(run, role):
        parts = [run.actor.engines[role].module.decoder.layers[0].forward]
        while hasattr(parts[-1], "func"):
            parts += [parts[-1].func, *(part for part in parts[-1].args if hasattr(part, "func"))]
        return any(part is _forward for part in parts)

    before = counters["stats"]["unique_graphs"]
    if not really:
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
        monkeypatch.setattr(compiled_head, "_tiles", compiled_head._tiles.__wrapped__)
    run = shop.run(f"compiled {really}", "A.use_torch_compile=true")
    assert (counters["stats"]["unique_graphs"] > before) == really
    old, now = f"{ACTOR}.use_torch_compile", f"{ACTOR}.fsdp_config.use_torch_compile"
    assert f"{old} is {now}=True here." in run.said
    assert compiled(run, "actor") and compiled(run, "ref") and not compiled(base, "actor")
    assert responses(run) == responses(base)
    for name in ("actor/grad_norm", "actor/entropy", "actor/kl"):
        assert run.rows[0][name] == pytest.approx(base.rows[0][name], rel=1e-4, abs=1e-6)
    apart = shop.run(f"actor compiled {really}", f"{now}=true REF.fsdp_config.use_torch_compile=false")
    assert compiled(apart, "actor") and not compiled(apart, "ref")


def test_determinism_is_asked_for_in_the_actors_work_alone(shop, base, monkeypatch):
    forward, seen = PolicyModel.forward, []

    def watched(self, inputs, outputs):
        frozen = not any(p.requires_grad for p in self.parameters())
        seen.append((frozen, torch.are_deterministic_algorithms_enabled()))
        return forward(self, inputs, outputs)

    monkeypatch.setattr(PolicyModel, "forward", watched)
    word = "{}.fsdp_config.full_determinism=true"
    run = shop.run("deterministic", word.format("A"))
    assert set(seen) == {(False, True), (True, False)}
    seen.clear()
    again = shop.run("deterministic_again", word.format("A"), word.format("REF"))
    assert set(seen) == {(False, True), (True, True)}
    assert not torch.are_deterministic_algorithms_enabled()
    assert same_weights(run, again) and same_weights(run, base)


@pytest.mark.parametrize("at", [ACTOR, REF, "critic"])
def test_the_older_name_is_explained_by_the_new_one(at):
    assert f"{at}.fsdp_config.use_torch_compile" in explain(f"{at}.use_torch_compile")
