import pytest
import torch

from tandem.models.linear import can_pack, linear, pack, packed_linear


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("rows", [1, 33, 200])
@pytest.mark.parametrize("with_bias", [True, False])
def test_products_equal_their_definition(dtype, tolerance, rows, with_bias):
    x, weight = torch.randn(rows, 70).to(dtype), torch.randn(50, 70).to(dtype)
    if not can_pack(weight):
        pytest.skip(f"this processor's oneDNN packs no {dtype}")
    bias = torch.randn(50).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    for out in (packed_linear(x, pack(weight), bias), linear(x, weight, bias)):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_packed_weight_is_a_copy():
    weight, x = torch.randn(40, 30), torch.randn(9, 30)
    if not can_pack(weight):
        pytest.skip("this processor's oneDNN packs nothing")
    packed, before = pack(weight), linear(x, weight)
    weight.zero_()
    torch.testing.assert_close(packed_linear(x, packed, None), before, atol=1e-5, rtol=0)


def test_float64_is_not_packed():
    assert not can_pack(torch.randn(4, 4, dtype=torch.float64))
