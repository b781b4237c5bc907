"""Compiled layers and heads: their gradients, how often they are compiled, and where they stay uncompiled."""

import shutil
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.engines.train.module import Settings, check_options
from tandem.errors import ConfigError
from tandem.models import compiled
from tandem.models.heads import compiled as compiled_head
from tandem.models.heads import tiled
from tandem.protocol import DataProto, Ragged
from tests.engines.train import synthetic
from tests.engines.train.on_ranks import on_ranks, seven_or_three
from tests.engines.train.synthetic import KEPT, OFFLOADS, batch_of, engine_keeping, output, train, weights

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
COMPILED = {"use_torch_compile": True}
MICRO, LOSS = synthetic.CUTS["three"], synthetic.SyntheticLoss()
WAYS = [
    *(("fp64", kept, offload) for kept in KEPT for offload in OFFLOADS),
    *(("fp32", "full", "none"), ("fp32", "none", "copied")),
]
MOST_GRAPHS = 16  # four parts of a layer, with and without gradients, and the head's tiles

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def precise_norm(self, hidden_states):
    """Replace the model's own norm, which rounds to fp32 at any precision."""
    mean = hidden_states.square().mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon))


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True, params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request, monkeypatch):
    """Choose the backend of torch.compile. Both get the same graphs, from which Inductor builds kernels."""
    monkeypatch.setattr(Qwen2RMSNorm, "forward", precise_norm)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))
    compiled_head._tiles.cache_clear()
    yield request.param
    compiled_head._tiles.cache_clear()


@pytest.fixture(scope="module")
def plain(folder):
    """Return uncompiled gradients and metrics by precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen2RMSNorm, "forward", precise_norm)
        engines = {precision: engine_keeping(folder, "none", "none", precision) for precision in TOLERANCE}
        return {p: synthetic.gradients(engine, batch_of(p), LOSS, MICRO) for p, engine in engines.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "kept", "offload"), WAYS)
def test_gradients_are_those_of_the_plain_layers(folder, plain, precision, kept, offload, recwarn):
    wanted, metrics = plain[precision]
    before = graphs()
    engine = engine_keeping(folder, kept, offload, precision, fsdp=COMPILED)
    for _ in range(2):
        found, also = synthetic.gradients(engine, batch_of(precision), LOSS, MICRO)
        assert synthetic.relative_difference(found, wanted) <= TOLERANCE[precision]
        assert {name: also[name] for name in metrics} == pytest.approx(metrics, rel=TOLERANCE[precision])
    assert graphs() - before <= MOST_GRAPHS and graphs() > 0
    assert not [warning for warning in recwarn if "view" in str(warning.message)]


@pytest.mark.slow
def test_no_shape_is_compiled_anew(folder):
    """After the first micro-batch, 36 more with different token counts and one to nine sequences follow."""
    engine = synthetic.make_engine(folder, fsdp=COMPILED)
    draw = torch.Generator().manual_seed(0)

    def go(lengths):
        tokens = Ragged.from_list([torch.randint(0, 31, (n,), generator=draw) for n in lengths])
        values = tokens.with_values(torch.randn(len(tokens.values), generator=draw, dtype=torch.float64) - 3)
        mask = tokens.with_values(tokens.positions() >= 1)
        columns = dict.fromkeys(("advantages", "old_log_probs", "ref_log_probs"), values)
        batch = DataProto({"tokens": tokens, "response_mask": mask, **columns})
        train(engine, batch, cut="all")
        output(engine, batch, cut="all")

    go([12, 9, 9])
    assert (before := graphs()) > 0
    for index in range(36):
        first, *others = torch.randint(2, 24, (1 + index % 9,), generator=draw).tolist()
        go([first + index, *others])
    assert graphs() == before


@pytest.mark.slow
def test_a_value_model_and_few_tokens(folder):
    """Nothing is compiled below eight tokens, and of a value model only the layers."""
    batch, loss = synthetic.make_batch(), synthetic.ValueLoss()
    engines = [synthetic.make_engine(folder, kind="value", fsdp=fsdp) for fsdp in ({}, COMPILED)]
    parts = [synthetic.gradients(engine, batch, loss, MICRO)[0] for engine in engines]
    # The head starts at zero, so all gradients but its own are zero.
    assert synthetic.relative_difference(*parts) <= 1e-9
    before = graphs()
    engine = synthetic.make_engine(folder, precision="fp32", kind="value", fsdp=COMPILED)
    short = DataProto({"tokens": Ragged.from_list([[1, 2, 3], [4]])})
    output(engine, short, "values", cut="all")
    assert graphs() == before


@pytest.mark.slow
def test_a_rollout_runs_the_layers_as_they_are(folder):
    """A rollout calls the layers without a packing, so they run uncompiled and compute the same."""
    engines = [synthetic.make_engine(folder, fsdp=fsdp) for fsdp in ({}, COMPILED)]
    before = graphs()
    assert torch.equal(*map(synthetic.borrowed_logits, engines))
    assert graphs() == before


@pytest.mark.parametrize(("with_entropy", "softcap"), [(False, 20.0), (True, 0.0)])
def test_the_heads_tiles(with_entropy, softcap):
    """Several tiles, with logits up to 80, give the same as the plain head."""
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 16, generator=draw, dtype=torch.float64) for n in (40, 700))
    targets = torch.randint(0, 700, (40,), generator=draw)
    found = []
    for head in (tiled.token_log_probs, compiled_head.token_log_probs):
        x, w = (4 * hidden).requires_grad_(), weight.clone().requires_grad_()
        options = {"temperature": 0.7, "softcap": softcap, "with_entropy": with_entropy}
        log_probs, entropy = head(x, w, targets, **options)
        total = log_probs.sin().sum() + (entropy.cos().sum() if entropy is not None else 0)
        total.backward()
        extra = {} if entropy is None else {"entropy": entropy}
        found.append({"log_probs": log_probs, "x": x.grad, "w": w.grad} | extra)
    assert synthetic.relative_difference(found[1], found[0]) <= 1e-12


def compiled_steps(folder):
    Qwen2RMSNorm.forward = precise_norm
    found = []
    for sequence in (1, 2):
        rows = synthetic.make_batch() if sequence == 2 else seven_or_three(synthetic.make_batch())
        fsdp = COMPILED | {"forward_prefetch": sequence == 2}
        engine = synthetic.make_engine(folder, fsdp=fsdp, sequence_parallel=sequence)
        gradients = synthetic.gradients(engine, rows, LOSS, MICRO)
        train(engine, rows)
        found.append((*gradients, weights(engine), graphs()))
    return found


@pytest.mark.slow
def test_two_ranks(folder, plain):
    """Layers are sharded, and with Ulysses the ranks exchange tokens within attention."""
    wanted, metrics = plain["fp64"]
    engine = synthetic.make_engine(folder)
    train(engine, synthetic.make_batch())
    for gradients, also, learnt, count in on_ranks(compiled_steps, folder)[0]:
        assert synthetic.relative_difference(gradients, wanted) <= 1e-9
        assert {name: also[name] for name in metrics} == pytest.approx(metrics, rel=1e-9)
        assert synthetic.relative_difference(learnt, weights(engine)) <= 1e-9
        assert 0 < count <= MOST_GRAPHS


# Options that are refused before anything is loaded.


def refusal(fsdp=None, device="cpu", **model):
    fsdp = FSDPConfig(**COMPILED, **(fsdp or {}))
    with pytest.raises(ConfigError) as caught:
        check_options(Settings(BackboneConfig(path="nowhere", **model), fsdp, None, torch.device(device)))
    return caught.value


@pytest.mark.parametrize(("device", "compiler"), [("cpu", "g++"), ("cuda", "gcc or clang")])
def test_no_compiler(monkeypatch, tmp_path, device, compiler):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    error = refusal(device=device)
    assert error.field == "fsdp_config.use_torch_compile" and compiler in error.got


def test_a_compiler_of_ones_own_and_no_headers(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert str(tmp_path / "none") in refusal().got
    monkeypatch.setenv("CXX", shutil.which("g++"))
    compiled.require_compiler(torch.device("cpu"))
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda name: str(tmp_path))
    assert str(tmp_path / "Python.h") in refusal().got


def test_what_cannot_be_compiled_together():
    assert refusal({"tensor_parallel_size": 2}).got == "true with fsdp_config.tensor_parallel_size=2"
    assert refusal(use_liger=True).got == "true with model.use_liger=true"
