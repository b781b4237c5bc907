import pytest
import torch

from tandem.models import heads
from tandem.models.heads import token_log_probs


def reference(hidden, weight, targets, temperature):
    log_p = torch.log_softmax(hidden.double() @ weight.double().T / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def case(rows, dtype):
    hidden = torch.randn(rows, 12, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(29, 12, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 29, (rows,))


@pytest.fixture(params=[1, 29 * 8 * 4, 1 << 20], ids=["chunks of 1", "chunks of 4 or 8", "one chunk"])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setitem(heads._CHUNK_BYTES, "cpu", request.param)


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2e-2)]
)
def test_values_and_gradients(temperature, dtype, tolerance):
    hidden, weight, targets = case(37, dtype)
    log_probs, entropy = token_log_probs(hidden, weight, targets, temperature=temperature, with_entropy=True)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = reference(*wide, targets, temperature)
    assert log_probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for got, want in zip((log_probs, entropy), expected, strict=True):
        assert (got - want).abs().max() <= tolerance * (1 + want.abs().max())

    mix = [torch.randn(37, dtype=torch.float64) for _ in range(2)]
    loss = (log_probs * mix[0] + entropy * mix[1]).sum()
    wanted_loss = (expected[0] * mix[0] + expected[1] * mix[1]).sum()
    got_grads = torch.autograd.grad(loss, (hidden, weight))
    for got, want in zip(got_grads, torch.autograd.grad(wanted_loss, wide), strict=True):
        assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_output_alone(which):
    hidden, weight, targets = case(9, torch.float64)
    outputs = token_log_probs(hidden, weight, targets, temperature=0.8, with_entropy=True)
    wide = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    expected = reference(*wide, targets, 0.8)
    got = torch.autograd.grad(outputs[which].sum(), (hidden, weight))
    for g, w in zip(got, torch.autograd.grad(expected[which].sum(), wide), strict=True):
        assert torch.allclose(g, w, atol=1e-12)


def test_entropy_only_where_asked_for():
    hidden, weight, targets = case(3, torch.float32)
    assert token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=False)[1] is None


def test_no_rows():
    hidden, weight, targets = case(0, torch.float64)
    log_probs, entropy = token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert weight.grad.abs().sum() == 0 and hidden.grad.shape == (0, 12)


def test_bf16_weight_gradient_is_summed_in_fp32(monkeypatch):
    # 4,096 chunks of one row: sums in bf16 would stand still long before the end.
    monkeypatch.setitem(heads._CHUNK_BYTES, "cpu", 1)
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(4096, dtype=torch.int64)
    log_probs, _ = token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=False)
    log_probs.sum().backward()
    assert weight.grad.flatten().tolist() == [2048.0, -2048.0]
