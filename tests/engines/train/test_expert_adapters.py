"""Adapters on experts, compared with weights merged expert by expert and with peft's own layers."""

from dataclasses import dataclass

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tandem.config.model import BackboneConfig, ModelConfig
from tandem.engines.train.muon import Muon
from tandem.engines.weight_sync import digest
from tandem.errors import ConfigError
from tandem.models import lora
from tandem.models.double_precision import double_precision
from tandem.models.loading import load_policy
from tandem.models.tensor_group import take
from tandem.observability.metrics import Metrics
from tandem.offline.export_lora import export_adapter, merged_weights
from tests.engines.train import synthetic
from tests.engines.train.matrix import adapters
from tests.engines.train.models import peft_folder
from tests.engines.train.on_ranks import on_ranks, seven_or_three
from tests.engines.train.synthetic import CUTS, make_batch, make_engine, output, same, weights
from tests.models.small import log_softmax
from tests.support.families import make_family

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
GATE_UP, DOWN = "experts.gate_up_proj", "mlp.experts.down_proj"
RANK, SCALE = 3, 2.0
KEYS = {"lora_rank": RANK, "lora_alpha": 6, "target_modules": ("o_proj",)}
BATCH = make_batch()


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_family(folder / family, family)
    make_family(folder / "three", "qwen3_moe", num_experts=3)
    return folder


@dataclass
class Weighted:
    """The mean of advantage times log-prob."""

    outputs: frozenset = frozenset({"log_probs"})
    columns: frozenset = frozenset({"response_mask", "advantages"})

    def __call__(self, out, columns, offsets, counts):
        loss = (out["log_probs"] * columns["advantages"] * columns["response_mask"]).sum() / counts.tokens
        return loss, Metrics()


def engine_of(folder, *targets, random=True, **keys):
    """Return an engine with adapters on `targets`. Its B are not zero if `random`."""
    engine = make_engine(folder, model={**KEYS, "target_parameters": targets or (GATE_UP, DOWN), **keys})
    draw = torch.Generator().manual_seed(7)
    for name, parameter in engine.module.named_parameters() if random else ():
        if ".lora_" in name:
            take(parameter.detach(), 0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return engine


def plain_model(folder):
    """Return transformers' model in float64, which computes one expert after the other."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)


def log_probs(model):
    """Return the log-prob of each token of the batch; zero at the first of a sequence."""
    tokens = BATCH.ragged("tokens")
    found = log_softmax(model, tokens).gather(1, tokens.values[:, None])[:, 0]
    return found * BATCH.ragged("response_mask").values


def merged_by_hand(base, factors, targets, *, transposed):
    """Return the weights W + s B A from peft's names and layouts, one expert after the other."""
    merged = dict(base)
    for name in [name for name in factors if ".lora_A." in name]:
        stem, a, b = name.removesuffix(".lora_A.weight"), factors[name], factors[name.replace("_A.", "_B.")]
        if stem.endswith("o_proj"):
            merged[f"{stem}.weight"] = base[f"{stem}.weight"] + SCALE * b @ a
            continue
        own = targets[0 if stem.endswith(".base_layer") else -1].rpartition(".")[2]
        target = f"{stem.removesuffix('.base_layer')}.{own}"
        count = len(base[target])
        deltas = [b[:, e::count] @ a[RANK * e : RANK * (e + 1)] for e in range(count)]
        merged[target] = base[target] + SCALE * torch.stack([d.T if transposed else d for d in deltas])
    return merged


@pytest.mark.parametrize(
    ("family", "targets"),
    [*((family, (GATE_UP, DOWN)) for family in FAMILIES), ("gpt_oss", (GATE_UP,)), ("mixtral", (DOWN,))],
)
def test_outputs_gradients_and_weights_are_those_of_merged_weights(families, family, targets):
    engine = engine_of(families / family, *targets)
    leaves = {name: value.requires_grad_() for name, value in adapters(engine).items()}
    plain = plain_model(families / family)
    base = {name: p.detach() for name, p in plain.named_parameters()}
    merged = merged_by_hand(base, leaves, targets, transposed=family == "gpt_oss")
    call = lambda ids: torch.func.functional_call(plain, merged, (ids,), {"use_cache": False})  # noqa: E731
    advantages, mask = (BATCH.ragged(name).values for name in ("advantages", "response_mask"))
    with double_precision():
        found, wanted = output(engine, BATCH).values, log_probs(call)
        ((wanted * advantages).sum() / mask.sum()).backward()
        taken, _ = synthetic.gradients(engine, BATCH, Weighted(), CUTS["three"])
    assert torch.allclose(found, wanted, rtol=0, atol=1e-9)
    grads = {engine.module.hf_name(name): value for name, value in taken.items()}
    assert len(grads) == 2 * 2 + 2 * len(targets) * (1 if family == "deepseek_v3" else 2)
    assert synthetic.relative_difference(grads, {name: leaf.grad for name, leaf in leaves.items()}) < 1e-9
    for name, value in weights(engine).items():
        if name in merged:
            assert torch.allclose(value, merged[name], rtol=0, atol=1e-12), name


def test_a_plain_engine_takes_the_merged_weights_and_the_base_stays(families):
    folder = families / "gpt_oss"
    engine, bare = engine_of(folder), make_engine(folder, frozen=True)
    assert torch.equal(output(engine, BATCH, adapter=False).values, output(bare, BATCH).values)
    bare.load_weights(weights(engine).items(), 1)
    assert engine.digest() == bare.digest() == digest(weights(engine).items())
    assert torch.allclose(output(engine, BATCH).values, output(bare, BATCH).values, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_and_exports_compute_the_same(families, tmp_path, family):
    """Peft loads exported adapters, and training starts from peft's adapters."""
    folder = families / family
    engine = engine_of(folder)
    keys = {**KEYS, "path": str(folder), "tokenizer_path": str(folder), "target_parameters": (GATE_UP, DOWN)}
    model = ModelConfig(**keys)
    engine.save(tmp_path / "state")
    exported, wanted = dict(merged_weights(tmp_path / "state", model, scores=False)), weights(engine)
    assert exported.keys() == wanted.keys()
    assert all(torch.allclose(exported[n].double(), w, rtol=0, atol=1e-12) for n, w in wanted.items())
    options = {"scores": False, "say": print}
    export_adapter(tmp_path / "state", model, tmp_path / "ours", torch.float64, **options)
    changes = {"target_modules": ["o_proj"], "target_parameters": [DOWN, GATE_UP]}
    peft_folder(folder, tmp_path / "theirs", **changes)
    started = engine_of(folder, random=False, lora_adapter_path=str(tmp_path / "theirs"))
    for adapter, ours in (("ours", engine), ("theirs", started)):
        peft, base = PeftModel.from_pretrained(plain_model(folder), tmp_path / adapter), plain_model(folder)
        with double_precision(), torch.no_grad():
            wanted, found = log_probs(peft), output(ours, BATCH).values
            assert (wanted - log_probs(base)).abs().max() > 1e-2
        assert torch.allclose(found, wanted, rtol=0, atol=1e-9)


def trained_on(folder, state):
    """Train, and return gradients, merged weights and digest. Then go on from a checkpoint."""
    engine = engine_of(folder, target_modules=())
    rows = seven_or_three(BATCH)
    grads, _ = synthetic.gradients(engine, rows, Weighted(), CUTS["three"])
    synthetic.train(engine, rows, steps=2)
    engine.save(state)
    resumed = engine_of(folder, target_modules=())
    resumed.load(state)
    assert same(adapters(resumed), adapters(engine))
    synthetic.train(engine, rows), synthetic.train(resumed, rows)
    assert same(adapters(resumed), adapters(engine))
    return grads, weights(engine), engine.digest(torch.float64)


def test_two_ranks_train_what_one_does(families, tmp_path):
    """The ranks have shards of two experts and of one."""
    grads, merged, sums = trained_on(families / "three", tmp_path / "one")
    for found, own, digested in on_ranks(trained_on, families / "three", tmp_path / "two"):
        assert synthetic.relative_difference(found, grads) < 1e-9
        assert synthetic.relative_difference(own, merged) < 1e-9
        assert digested == digest(own.items()) and digested.keys() == sums.keys()


@pytest.mark.parametrize("kept", ["full", "ops"])
def test_recomputation_changes_no_gradient(families, kept):
    folder = families / "gpt_oss"
    found, wanted = (
        synthetic.gradients(engine_of(folder, **synthetic.KEPT[way]), BATCH, Weighted(), CUTS["three"])[0]
        for way in (kept, "none")
    )
    assert synthetic.relative_difference(found, wanted) < 1e-12


def test_muon_orthogonalizes_no_stack_of_experts(families):
    model = {**KEYS, "target_parameters": (DOWN,)}
    engine = make_engine(families / "mixtral", model=model, optim={"optimizer": "muon"})
    names = {p: name for name, p in engine.module.named_parameters()}
    (muon,) = (each for each in engine._state.optimizers if isinstance(each, Muon))
    assert {".o_proj." in names[p] for group in muon.param_groups for p in group["params"]} == {True}


@pytest.mark.parametrize(
    ("kind", "targets", "said"),
    [
        ("gpt_oss", ("experts.down_prj",), "did you mean experts.down_proj?"),
        ("gpt_oss", ("experts.down_proj_bias",), "such as experts.down_proj, experts.gate_up_proj"),
        ("gpt_oss", (DOWN, "router.weight"), "got:      router.weight"),
        ("llama4_text", ("experts.down_proj",), "no experts that can have adapters"),
    ],
)
def test_weights_that_cannot_have_adapters_are_refused(tmp_path, kind, targets, said):
    backbone = load_policy(make_family(tmp_path, kind), weights=False)
    section = BackboneConfig(path=str(tmp_path), **KEYS, target_parameters=targets)
    with pytest.raises(ConfigError) as caught:
        lora.add_adapters(backbone, section, "policy", torch.float32)
    assert caught.value.field == "model.target_parameters" and said in str(caught.value)
