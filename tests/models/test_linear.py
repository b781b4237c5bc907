import copy

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.models import linear as linear_module
from tandem.models.linear import can_pack, linear, product, wide_product


@pytest.fixture(params=[True, False], ids=["onednn", "plain"], autouse=True)
def onednn(request, monkeypatch):
    if request.param and not linear_module._ONEDNN:
        pytest.skip("this build has no oneDNN")
    monkeypatch.setattr(linear_module, "_ONEDNN", request.param)
    monkeypatch.setattr(linear_module, "_INTEL", False)
    return request.param


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("shape", [(3, 40), (1, 200, 40), (4, 9, 40), (0, 40)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients(dtype, tolerance, shape, with_bias):
    sizes = (shape, (24, 40), (24,))[: 2 + with_bias]
    leaves = [torch.randn(size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out, expected = linear(*leaves), F.linear(*wide)
    assert out.dtype == dtype and out.shape == expected.shape
    direction = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, direction)
    wanted = torch.autograd.grad(expected, wide, direction.double())
    for g, w in zip((out, *got), (expected, *wanted), strict=True):
        assert (g.double() - w).norm() <= tolerance * w.norm()
    with torch.no_grad():
        assert torch.equal(linear(*leaves), out)


def test_only_needed_gradients():
    inputs, weight = torch.randn(16, 8), torch.randn(4, 8, requires_grad=True)
    (linear(inputs, weight)).sum().backward()
    assert inputs.grad is None and torch.allclose(weight.grad, inputs.sum(0).expand(4, 8), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_product_takes_transposed_views(dtype):
    left, right = torch.randn(12, 30, dtype=dtype), torch.randn(12, 20, dtype=dtype)
    assert torch.allclose(product(left.T, right.T), left.T @ right, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_wide_product(dtype):
    left, right = torch.randn(12, 30).to(dtype), torch.randn(20, 30).to(dtype)
    got, want = wide_product(left, right), left.double() @ right.double().T
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (got - want).norm() <= (5e-3 if dtype == torch.bfloat16 else 1e-6) * want.norm()


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_wide_product_on_cuda_rounds_nothing_to_half_precision(dtype):
    """Check the call, without a device."""
    with FakeTensorMode(), Called() as called:
        out = wide_product(*(torch.empty(rows, 30, dtype=dtype, device="cuda") for rows in (12, 20)))
    wide = dtype.itemsize >= 4
    assert (out.dtype, tuple(out.shape)) == (dtype if wide else torch.float32, (12, 20))
    assert [name for name in called.names if "mm" in name] == ["aten.mm.default" if wide else "aten.mm.dtype"]
    assert not any("to_copy" in name for name in called.names)


@pytest.mark.parametrize("intel", [True, False])
def test_the_library_is_that_of_the_processor(intel, monkeypatch, onednn):
    monkeypatch.setattr(linear_module, "_INTEL", intel)
    with Called() as called:
        product(torch.randn(64, 32), torch.randn(16, 32))
    assert any("_linear_pointwise" in name for name in called.names) == (onednn and not intel)


@pytest.mark.parametrize("rows", [5, 16])
def test_bits_do_not_depend_on_who_takes_a_gradient(rows):
    """Use the last positions of a batch, as a head does."""
    last, weight = torch.randn(rows, 35, 32)[:, -1:], torch.randn(97, 32)
    with torch.no_grad():
        assert torch.equal(linear(last, weight), linear(last, torch.nn.Parameter(weight)))


def test_only_plain_linears_are_changed():
    class Other(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Other(8, 8), torch.nn.ReLU())
    names, x = list(model.state_dict()), torch.randn(9, 8)
    before = model(x)
    linear_module.speed_up_linears(model)
    assert ["forward" in vars(module) for module in model] == [True, False, False]
    assert list(model.state_dict()) == names and torch.allclose(model(x), before, atol=1e-6)
    twin = copy.deepcopy(model)
    torch.nn.init.zeros_(twin[0].weight)
    assert not torch.equal(twin(x), model(x))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("rows", [1, 33, 200])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_packed_weight_is_a_copy_with_the_same_products(dtype, tolerance, rows, with_bias):
    x, weight = torch.randn(rows, 70).to(dtype), torch.randn(50, 70).to(dtype)
    assert not can_pack(weight.double())
    if not can_pack(weight):
        pytest.skip(f"this processor's oneDNN packs no {dtype}")
    bias = torch.randn(50).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    packed, plain = linear_module.pack(weight), linear(x, weight, bias)
    weight.zero_()
    for out in (linear_module.packed_linear(x, packed, bias), plain):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_repeats_bit_for_bit():
    inputs, weight = torch.randn(300, 64), torch.randn(96, 64, requires_grad=True)
    first, *others = [torch.autograd.grad(linear(inputs, weight).square().sum(), weight)[0] for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)
