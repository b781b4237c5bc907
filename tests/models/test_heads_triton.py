"""The Triton head (interpreted on a CPU) compared with the float64 reference."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.models.heads import make_head, tiled, triton
from tandem.models.heads.triton import Blocks
from tests.support.heads import check_head, make_case

pytestmark = pytest.mark.triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BFLOAT16 = pytest.param(
    *(torch.bfloat16, 1e-2),
    marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no product of bfloat16"),
)


def cut(monkeypatch, span, tile):
    monkeypatch.setattr(triton, "_SPAN", span)
    monkeypatch.setattr(tiled, "_LEAST_TILE", tile)
    monkeypatch.setitem(tiled.TILE_BYTES, DEVICE.type, 1)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 70), st.integers(1, 300), st.integers(1, 70)),
    span=st.sampled_from([128, 256]),
    tile=st.sampled_from([32, 100, 512]),
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
    scale=st.sampled_from([0.0, 1.0, 300.0]),
    softcap=st.sampled_from([0.0, 2.0, 30.0]),
    blocks=st.sampled_from([None, Blocks(16, 32, 16, warps=4, together=2)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(sizes, span, tile, temperature, scale, softcap, blocks, seed):
    hidden, weight, targets = make_case(*sizes, torch.float64, scale=scale, seed=seed, device=DEVICE)
    whole = [leaf.detach().round().float().requires_grad_() for leaf in (hidden, weight)]  # exact logits
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, span, tile)
        if blocks is not None:
            patch.setattr(Blocks, "of", lambda dtype, device: blocks)
        check_head(triton.token_log_probs, *whole, targets, temperature, 2e-6 if softcap else 1e-6, softcap)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-3), BFLOAT16]
)
def test_types(dtype, tolerance, monkeypatch):
    cut(monkeypatch, 128, 256)
    check_head(triton.token_log_probs, *make_case(130, 700, 72, dtype, device=DEVICE), 0.6, tolerance)


@pytest.mark.parametrize("major", [8, 9])
def test_blocks_of_a_capability(major, monkeypatch):
    cut(monkeypatch, 128, 512)
    blocks = Blocks.for_capability(torch.float16, major)
    assert blocks.columns == (256 if major == 9 else 128)
    monkeypatch.setattr(Blocks, "of", lambda dtype, device: blocks)
    check_head(triton.token_log_probs, *make_case(130, 700, 72, torch.float16, device=DEVICE), 0.6, 2e-3)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_output_alone(which, monkeypatch):
    cut(monkeypatch, 128, 64)
    hidden, weight, targets = make_case(9, 200, 12, torch.float32, device=DEVICE)
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    grads = [
        torch.autograd.grad(head(*leaves, targets, temperature=0.8, with_entropy=True)[which].sum(), leaves)
        for head, leaves in ((triton.token_log_probs, (hidden, weight)), (tiled.token_log_probs, wide))
    ]
    for got, want in zip(*grads, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_rows_that_are_not_contiguous_and_no_entropy():
    hidden, weight, targets = make_case(9, 200, 12, torch.float32, device=DEVICE)
    spread = hidden.detach().T.contiguous().T, weight.detach().repeat(1, 2)[:, :12]
    pairs = targets.repeat_interleave(2)[::2]
    got, entropy = triton.token_log_probs(*spread, pairs, temperature=1.0, with_entropy=False)
    want, _ = tiled.token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=False)
    assert entropy is None
    torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_cuda_device_takes_it_by_itself_and_repeats_bit_for_bit():
    head = make_head("auto", torch.device("cuda"))
    assert head is triton.token_log_probs
    runs = []
    for _ in range(2):
        hidden, weight, targets = make_case(1000, 20_000, 512, torch.bfloat16, scale=0.05, device="cuda")
        log_probs, entropy = head(hidden, weight, targets, temperature=0.7, with_entropy=True)
        runs.append([log_probs, entropy, *torch.autograd.grad((log_probs + entropy).sum(), (hidden, weight))])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
