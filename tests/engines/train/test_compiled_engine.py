"""Compiled layers and heads: their gradients, how often they are compiled, and where they stay uncompiled."""

import shutil
from functools import partial

import compiled_job
import pytest
import synthetic
import torch
from activation_job import MODES, OFFLOADS, engine_with
from compiled_job import COMPILED, graphs, precise_norm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.engines.train.module import Settings, check_options
from tandem.errors import ConfigError
from tandem.models import compiled
from tandem.models.heads import compiled as compiled_head
from tandem.models.heads import tiled
from tandem.protocol import DataProto, Ragged
from tests.support.ranks import run_ranks

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
MICRO, LOSS = synthetic.CUTS["three"], synthetic.SyntheticLoss()
CPU = torch.device("cpu")
WAYS = [
    *(("fp64", mode, offload) for mode in MODES for offload in OFFLOADS),
    ("fp32", "full", "none"),
    ("fp32", "none", "copied"),
]
MOST_GRAPHS = 16
"""The most graphs that one precision may compile.

They are four parts of a layer, with and without gradients, and the head's tiles.
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(autouse=True, params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request, monkeypatch):
    """Choose the backend of torch.compile.

    Both backends get the same graphs. Inductor takes a minute to build kernels from them.
    """
    monkeypatch.setattr(Qwen2RMSNorm, "forward", precise_norm)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))
    compiled_head._tiles.cache_clear()
    yield request.param
    compiled_head._tiles.cache_clear()


@pytest.fixture(scope="module")
def plain(folder):
    """Return uncompiled gradients and metrics by precision."""
    kept = Qwen2RMSNorm.forward
    Qwen2RMSNorm.forward = precise_norm
    try:
        found = {}
        for precision, dtype in DTYPES.items():
            engine = engine_with(folder, "none", "none", precision)
            found[precision] = synthetic.gradients(engine, synthetic.make_batch(dtype), LOSS, MICRO)
        return found
    finally:
        Qwen2RMSNorm.forward = kept


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "mode", "offload"), WAYS)
def test_gradients_are_those_of_the_plain_layers(folder, plain, precision, mode, offload, recwarn):
    wanted, metrics = plain[precision]
    before = graphs()
    engine = engine_with(folder, mode, offload, precision, fsdp=COMPILED)
    batch = synthetic.make_batch(DTYPES[precision])
    for _ in range(2):
        found, also = synthetic.gradients(engine, batch, LOSS, MICRO)
        assert synthetic.relative_difference(found, wanted) <= TOLERANCE[precision]
        assert {name: also[name] for name in metrics} == pytest.approx(metrics, rel=TOLERANCE[precision])
    assert graphs() - before <= MOST_GRAPHS
    assert graphs() > 0
    assert not [warning for warning in recwarn if "view" in str(warning.message)]


@pytest.mark.slow
def test_no_shape_is_compiled_anew(folder):
    """After the first micro-batch, 36 more with different token counts and one to nine sequences follow."""
    engine = synthetic.make_engine(folder, fsdp=COMPILED)
    draw = torch.Generator().manual_seed(0)

    def batch_of(lengths):
        tokens = Ragged.from_list([torch.randint(0, 31, (n,), generator=draw) for n in lengths])
        noise = torch.randn(3, len(tokens.values), generator=draw, dtype=torch.float64)
        columns = ("advantages", "old_log_probs", "ref_log_probs")
        values = {name: tokens.with_values(row - 3) for name, row in zip(columns, noise, strict=True)}
        mask = tokens.with_values(tokens.positions() >= 1)
        return DataProto({"tokens": tokens, "response_mask": mask, **values})

    def go(batch):
        engine.train_step(batch, LOSS, micro=synthetic.CUTS["all"])
        engine.forward(batch, outputs=frozenset({"log_probs"}), micro=synthetic.CUTS["all"])

    go(batch_of([12, 9, 9]))
    assert graphs() > 0
    before, counts = graphs(), set()
    for index in range(36):
        lengths = torch.randint(2, 24, (1 + index % 9,), generator=draw).tolist()
        lengths[0] += index
        counts.add(sum(lengths))
        go(batch_of(lengths))
    assert len(counts) > 30
    assert graphs() == before


def test_a_value_model_and_few_tokens(folder):
    """Nothing is compiled below eight tokens.

    For models other than a policy, only the layers are compiled.
    """
    batch, loss = synthetic.make_batch(), synthetic.ValueLoss()
    parts = [
        synthetic.gradients(synthetic.make_engine(folder, kind="value", fsdp=fsdp), batch, loss, MICRO)[0]
        for fsdp in ({}, COMPILED)
    ]
    # The head starts at zero, so all gradients but its own are zero.
    assert synthetic.relative_difference(*parts) <= 1e-9
    before = graphs()
    engine = synthetic.make_engine(folder, precision="fp32", kind="value", fsdp=COMPILED)
    short = DataProto({"tokens": Ragged.from_list([[1, 2, 3], [4]])})
    engine.forward(short, outputs=frozenset({"values"}), micro=synthetic.CUTS["all"])
    assert graphs() == before


def test_a_rollout_runs_the_layers_as_they_are(folder):
    """A rollout calls the layers without a packing, so they run uncompiled and compute the same."""
    engines = [synthetic.make_engine(folder, fsdp=fsdp) for fsdp in ({}, COMPILED)]
    before, logits = graphs(), []
    for engine in engines:
        with engine.unsharded() as module, torch.no_grad():
            module.set_attn_implementation("sdpa")
            logits.append(module(torch.arange(9)[None], use_cache=False).logits)
            module.set_attn_implementation("tandem_packed")
    assert torch.equal(*logits)
    assert graphs() == before


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_heads_tiles(with_entropy):
    """Several tiles, with logits up to 80, give the same as the plain head."""
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 16, generator=draw, dtype=torch.float64) for n in (40, 700))
    targets = torch.randint(0, 700, (40,), generator=draw)
    found = []
    for head in (tiled.token_log_probs, compiled_head.token_log_probs):
        x, w = (4 * hidden).requires_grad_(), weight.clone().requires_grad_()
        log_probs, entropy = head(x, w, targets, temperature=0.7, with_entropy=with_entropy)
        total = log_probs.sin().sum() + (entropy.cos().sum() if entropy is not None else 0)
        total.backward()
        found.append({"log_probs": log_probs, "x": x.grad, "w": w.grad})
        if entropy is not None:
            found[-1]["entropy"] = entropy
    assert synthetic.relative_difference(found[1], found[0]) <= 1e-12


@pytest.mark.slow
def test_two_ranks(folder, plain, tmp_path):
    """Layers are sharded, and with Ulysses the ranks exchange tokens within attention."""
    run_ranks(compiled_job.__file__, folder, tmp_path / "record.pt", timeout=500)
    wanted, metrics = plain["fp64"]
    engine = synthetic.make_engine(folder)
    engine.train_step(synthetic.make_batch(), LOSS, micro=MICRO)
    for gradients, also, weights, count in torch.load(tmp_path / "record.pt").values():
        assert synthetic.relative_difference(gradients, wanted) <= 1e-9
        assert {name: also[name] for name in metrics} == pytest.approx(metrics, rel=1e-9)
        assert synthetic.relative_difference(weights, synthetic.weights(engine)) <= 1e-9
        assert 0 < count <= MOST_GRAPHS


# Options that are refused before anything is loaded.


def refusal(fsdp=None, device=CPU, **model):
    fsdp = FSDPConfig(**COMPILED, **(fsdp or {}))
    settings = Settings(BackboneConfig(path="nowhere", **model), fsdp, None, device)
    with pytest.raises(ConfigError) as caught:
        check_options(settings)
    return caught.value


@pytest.mark.parametrize(("device", "compiler"), [("cpu", "g++"), ("cuda", "gcc or clang")])
def test_no_compiler(monkeypatch, tmp_path, device, compiler):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    error = refusal(device=torch.device(device))
    assert error.field == "fsdp_config.use_torch_compile"
    assert error.got == f"true, with no compiler {compiler} on the PATH"
    assert error.remedy == "install them (g++ and python3-dev), or set use_torch_compile=false"


def test_a_compiler_of_ones_own(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert str(tmp_path / "none") in refusal().got
    monkeypatch.setenv("CXX", shutil.which("g++"))
    compiled.require_compiler(CPU)


def test_no_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda name: str(tmp_path))
    assert refusal().got == f"true, with no file {tmp_path / 'Python.h'}"


def test_what_cannot_be_compiled_together():
    error = refusal({"tensor_parallel_size": 2})
    assert error.got == "true with fsdp_config.tensor_parallel_size=2"
    assert refusal(use_liger=True).got == "true with model.use_liger=true"


def test_layers_that_are_called_otherwise_stay_as_they_are():
    calls = []
    forward = compiled._forward
    hidden, few = torch.zeros(1, 9, 2), torch.zeros(1, 7, 2)
    for x, kwargs in (
        (hidden, {"packing": 1}),
        (few, {"packing": 1}),
        (hidden, {}),
        (hidden, {"packing": None}),
    ):
        forward(
            lambda *_, **__: calls.append("plain"), lambda *_, **__: calls.append("compiled"), x, **kwargs
        )
    assert calls == ["compiled", "plain", "plain", "plain"]
