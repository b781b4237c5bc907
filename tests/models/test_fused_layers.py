"""Norms and gates in Triton (interpreted on a CPU), compared with float64 and with transformers' modules."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from tandem.engines.train import module as engine_module
from tandem.engines.train.base import MicroBatching
from tandem.models import fused
from tandem.models.fused import fuse, gated, rms_norm
from tests.engines.train import synthetic

pytestmark = pytest.mark.triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
KINDS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def random(*shape, dtype, scale=1.0):
    values = scale * torch.randn(*shape, dtype=torch.float64)
    return values.to(DEVICE, dtype).requires_grad_()


def check(function, plain, leaves, limit):
    """Check that values and gradients differ from `plain` in float64 by at most `limit` times their size."""
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got, want = function(*leaves), plain(*wide)
    assert got.dtype == leaves[0].dtype and got.shape == want.shape
    direction = torch.randn_like(want)
    found = torch.autograd.grad(got, leaves, direction.to(got.dtype))
    expected = torch.autograd.grad(want, wide, direction)
    for value, right in zip((got, *found), (want, *expected), strict=True):
        assert value.dtype == got.dtype
        assert (value.double() - right).norm() <= limit * right.norm()


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 20),
    features=st.integers(8, 200),  # with fewer, the gradient is a small difference of large numbers
    programs=st.sampled_from([1, 3, 528]),
    block=st.sampled_from([64, 4096]),
    dtype=st.sampled_from(list(LIMITS)),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_norm(rows, features, programs, block, dtype, scale):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_PROGRAMS", programs)
        patch.setattr(fused, "_BLOCK", block)
        leaves = random(2, rows, features, dtype=dtype, scale=scale), random(features, dtype=dtype)
        plain = lambda x, weight: weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()  # noqa: E731
        check(lambda x, weight: rms_norm(x, weight, 1e-6), plain, leaves, LIMITS[dtype])


not_interpreted = pytest.mark.skipif(DEVICE.type == "cpu", reason="interpreted bfloat16 loses digits")


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=not_interpreted)])
def test_norm_rounds_where_transformers_does(dtype):
    """An element may differ by one unit in the last place if the row's sum does."""
    norm = Qwen2RMSNorm(96).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(96))
    x = random(200, 96, dtype=dtype).detach()
    got, want = rms_norm(x, norm.weight, norm.variance_epsilon).detach(), norm(x).detach()
    assert (got == want).double().mean() > 0.995
    assert bool(((got - want).abs() <= 2 * torch.finfo(dtype).eps * want.abs()).all())


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 20),
    features=st.integers(1, 200),
    dtype=st.sampled_from(list(LIMITS)),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_gate(rows, features, dtype, scale):
    leaves = [random(rows, features, dtype=dtype, scale=scale) for _ in range(2)]
    check(gated, lambda gate, up: torch.nn.functional.silu(gate) * up, leaves, LIMITS[dtype])


def test_gates_far_from_zero():
    gate = torch.tensor([-200.0, -90.0, 90.0, 200.0], device=DEVICE, requires_grad=True)
    up = torch.full_like(gate, 2.0, requires_grad=True)
    out = gated(gate, up)
    out.sum().backward()
    assert out.tolist() == [0.0, pytest.approx(0.0, abs=1e-30), 180.0, 400.0]
    assert gate.grad.tolist() == [0.0, pytest.approx(0.0, abs=1e-30), 2.0, 2.0]


def test_views_no_rows_and_a_frozen_weight():
    x, weight = random(24, 7, dtype=torch.float32), random(24, dtype=torch.float32)
    got = torch.autograd.grad(rms_norm(x.T, weight.detach(), 1e-6).square().sum(), x)[0]
    want = torch.autograd.grad(rms_norm(x.T.contiguous(), weight, 1e-6).square().sum(), x)[0]
    assert torch.equal(got, want)
    none = rms_norm(x.T[:0], weight, 1e-6)
    gradient = torch.autograd.grad((none * gated(x.T[:0], x.T[:0])).sum(), weight)[0]
    assert none.shape == (0, 24) and not gradient.any()


def small(kind, dtype=torch.float32):
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return AutoModelForCausalLM.from_config(KINDS[kind](**sizes, **heads)).to(DEVICE, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_the_same_with_it(kind):
    plain = small(kind)
    changed = copy.deepcopy(plain)
    assert fuse(changed) == 2 * (3 + 2 * (kind == "qwen3")) + 1
    ids = torch.arange(12, device=DEVICE).view(2, 6)
    outputs = [model(ids, labels=ids) for model in (plain, changed)]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-5, atol=1e-5)
    for out in outputs:
        out.loss.backward()
    for (name, want), (same, got) in zip(plain.named_parameters(), changed.named_parameters(), strict=True):
        assert name == same
        assert (got.grad - want.grad).norm() <= 1e-5 * (1e-3 + want.grad.norm()), name
    assert "forward" not in vars(plain.model.norm)


def test_double_precision_runs_as_it_is(monkeypatch):
    model = small("qwen2", torch.float64)
    ids = torch.arange(6, device=DEVICE).view(1, 6)
    want = model(ids).logits
    fuse(model)
    monkeypatch.setattr(fused, "rms_norm", None)
    assert torch.equal(model(ids).logits, want)


WAYS = [{"lora_rank": 2}, *(synthetic.KEPT[kept] for kept in ("none", "full", "ops"))]


@pytest.mark.parametrize("keys", WAYS, ids=str)
def test_an_engine_has_the_same_gradients(keys, qwen2_folder, monkeypatch):
    def fused_kernels(model, *_, **__):
        fuse(model)
        return "triton"

    found = []
    for choose in (engine_module.choose_kernels, fused_kernels):
        monkeypatch.setattr(engine_module, "choose_kernels", choose)
        torch.manual_seed(0)
        engine = synthetic.make_engine(qwen2_folder, precision="fp32", model=keys)
        fuses = choose is fused_kernels
        assert ("forward" in vars(engine.module.decoder.norm)) == fuses
        assert str(engine.kernels).endswith("fused Triton kernels" if fuses else "layers by transformers")
        for parameter in engine.module.parameters():
            if not parameter.requires_grad:  # `gradients` needs the gradients of all
                parameter.grad = torch.zeros_like(parameter)
        given = synthetic.make_batch(dtype=torch.float32), synthetic.SyntheticLoss()
        found.append(synthetic.gradients(engine, *given, MicroBatching(max_samples=4))[0])
    assert synthetic.relative_difference(*found) < 1e-5


@pytest.mark.gpu
def test_on_a_gpu_it_repeats_bit_for_bit():
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        x, weight = random(5000, 1536, dtype=torch.bfloat16), random(1536, dtype=torch.bfloat16)
        total = gated(rms_norm(x, weight, 1e-6), x).float().square().sum()
        runs.append(torch.autograd.grad(total, (x, weight)))
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
