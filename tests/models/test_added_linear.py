import pytest
import torch

from tandem.models import linear as products


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.1)]
)
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_products_equal_their_definition(dtype, tolerance, onednn, with_bias, monkeypatch):
    if not onednn:
        monkeypatch.setattr(products, "_ONEDNN", False)
    torch.manual_seed(0)
    x, weight = torch.randn(33, 70).to(dtype), torch.randn(50, 70).to(dtype)
    bias = torch.randn(50).to(dtype) if with_bias else None
    residual = torch.randn(33, 50).to(dtype)
    before = residual.clone()
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    out = products.linear(x, weight, bias)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    added = products.added_linear(residual, x, weight, bias)
    torch.testing.assert_close(added.double(), residual.double() + expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(residual, before, atol=0, rtol=0)
