import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.model import FusedKernelOptions, ModelConfig
from tandem.errors import ConfigError
from tandem.models.heads import make_head, tiled, token_log_probs
from tandem.models.linear import wide_product
from tests.models.small import CPU, make_engine
from tests.support.heads import Largest, check_head, cut, make_case, reference


@pytest.fixture(params=[1, 8, 29, 64])
def width(request, monkeypatch):
    cut(monkeypatch, request.param)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 40), st.integers(1, 70), st.integers(1, 20)),
    tile=st.integers(1, 80),
    kept=st.sampled_from([0, 1 << 20]),
    temperature=st.floats(0.05, 20.0),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    softcap=st.sampled_from([0.0, 2.0, 30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_in_float64(sizes, tile, kept, temperature, scale, softcap, seed):
    hidden, weight, targets = make_case(*sizes, torch.float64, scale=scale * temperature, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, tile)
        patch.setattr(tiled, "_KEPT_BYTES", kept)
        largest = (hidden @ weight.T).abs().max().item() / temperature if sizes[0] else 0.0
        check_head(token_log_probs, hidden, weight, targets, temperature, 1e-14 * (100 + largest), softcap)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_lower_precision(temperature, softcap, dtype, tolerance):
    check_head(token_log_probs, *make_case(37, 29, 12, dtype), temperature, tolerance, softcap)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_logits_of_tens_of_thousands_lose_nothing_in_float32(temperature):
    hidden, weight, targets = make_case(37, 29, 12, torch.float64, scale=1000.0)
    whole = [leaf.detach().round().float().requires_grad_() for leaf in (hidden, weight)]  # exact logits
    assert (whole[0] @ whole[1].T).abs().max() > 8000
    check_head(token_log_probs, *whole, targets, temperature, 1e-6)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_output_alone(which):
    hidden, weight, targets = make_case(9, 29, 12, torch.float64)
    wide = [leaf.detach().clone().requires_grad_() for leaf in (hidden, weight)]
    found = token_log_probs(hidden, weight, targets, temperature=0.8, with_entropy=True)[which].sum()
    expected = reference(*wide, targets, 0.8)[which].sum()
    got, want = torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(expected, wide)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient_and_the_other_the_same(frozen):
    """Nor is there an entropy that nobody asked for, or a log-prob that depends on it."""
    *case, targets = make_case(9, 29, 12, torch.float64)
    leaves = [leaf.detach().clone().requires_grad_(index != frozen) for index, leaf in enumerate(case)]
    for pair in (case, leaves):
        log_probs, entropy = token_log_probs(*pair, targets, temperature=1.0, with_entropy=False)
        log_probs.sum().backward()
    assert entropy is None and leaves[frozen].grad is None
    assert torch.equal(leaves[1 - frozen].grad, case[1 - frozen].grad)
    assert torch.equal(log_probs, token_log_probs(*case, targets, temperature=1.0, with_entropy=True)[0])


def test_a_distribution_of_one_entry_has_no_entropy():
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    weight, target = torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([1])
    log_probs, entropy = token_log_probs(hidden, weight, target, temperature=0.5, with_entropy=True)
    (log_probs + entropy).sum().backward()
    assert (log_probs.item(), entropy.item(), hidden.grad.item()) == (0.0, 0.0, 0.0)


def test_bf16_weight_gradient_is_summed_in_fp32():
    hidden, targets = torch.ones(4096, 1, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.int64)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=False)[0].sum().backward()
    assert weight.grad.flatten().tolist() == [2048.0, -2048.0]


def test_nothing_is_larger_than_a_tile_or_the_weight():
    case = make_case(2048, 16384, 8, torch.bfloat16)
    with Largest() as largest:
        log_probs, entropy = token_log_probs(*case, temperature=0.9, with_entropy=True)
        torch.autograd.backward((log_probs + entropy).sum())
    assert largest.bytes <= tiled.TILE_BYTES["cpu"] < 2048 * 16384 * 2 / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_logits_that_fit_are_made_once_and_change_no_bit(dtype, with_entropy, monkeypatch):
    """There are four products that compute logits, and four more in each backward pass where none fits."""
    cut(monkeypatch, 8)
    made, found = [], []
    monkeypatch.setattr(tiled, "wide_product", lambda *pair: made.append(1) or wide_product(*pair))
    for budget, products in ((37 * 29 * 4, 4), (37 * 29 * 4 - 1, 12)):
        monkeypatch.setattr(tiled, "_KEPT_BYTES", budget)
        made.clear()
        hidden, weight, targets = make_case(37, 29, 12, dtype)
        options = {"temperature": 0.7, "softcap": 3.0, "with_entropy": with_entropy}
        outputs = token_log_probs(hidden, weight, targets, **options)
        outputs = [value for value in outputs if value is not None]
        total = sum((value * torch.arange(37)).sum() for value in outputs)
        twice = [torch.autograd.grad(total, (hidden, weight), retain_graph=again) for again in (True, False)]
        assert all(torch.equal(first, second) for first, second in zip(*twice, strict=True))
        assert len(made) == products
        found.append([*outputs, *twice[0]])
    assert all(torch.equal(kept, made_again) for kept, made_again in zip(*found, strict=True))


@pytest.mark.parametrize("learns", [True, False])
def test_logits_wait_for_a_backward_pass_alone(learns, monkeypatch):
    hidden, weight, targets = make_case(37, 29, 12, torch.float32)
    asked, sums = [], tiled.TorchTiles.sums
    noted = lambda self, *args, keep: asked.append(keep) or sums(self, *args, keep=keep)  # noqa: E731
    monkeypatch.setattr(tiled.TorchTiles, "sums", noted)
    with torch.set_grad_enabled(learns):
        tiled.tiled_log_probs(tiled.TorchTiles(), hidden, weight, targets, 1.0, True)
    tiled.tiled_log_probs(tiled.TorchTiles(), hidden.detach(), weight.detach(), targets, 1.0, True)
    assert asked == [learns, False]


@pytest.mark.gpu
def test_bf16_logits_on_a_gpu_are_those_of_fp32_sums():
    """If logits of 30 were rounded to bf16, they and the log-probs would have errors of 0.06."""
    hidden, weight, targets = make_case(500, 3000, 64, torch.bfloat16, device="cuda")
    want = reference(hidden, weight, targets, 1.0)
    outputs = token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=True)
    rounded = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]
    pairs = zip((*outputs, rounded), (*want, want[0]), strict=True)
    errors = [(got - value).abs().max().item() for got, value in pairs]
    assert max(errors[:2]) < 1e-4 < 1e-2 < errors[2]
    check_head(token_log_probs, hidden, weight, targets, 1.0, 1e-2)


def test_heads_on_a_cpu():
    assert make_head("torch", CPU) is make_head("auto", CPU) is token_log_probs
    for name in ("triton", "liger"):
        with pytest.raises(ConfigError, match=r"CUDA(?s:.)*impl_backend=auto"):
            make_head(name, CPU)
    with pytest.raises(ConfigError, match="does not support the softcap"):
        make_head("liger", CPU, softcap=30.0)


def test_the_engine_takes_the_head_that_the_config_names(qwen2_folder):
    options = {"path": str(qwen2_folder), "tokenizer_path": ""}
    fused = ModelConfig(**options, fused_kernel_options=FusedKernelOptions(impl_backend="triton"))
    used, *others = (fused.model_copy(update={"use_fused_kernels": used}) for used in (True, False, None))
    for keys in ({"model": used}, {"use_liger": True}):
        with pytest.raises(ConfigError, match="CUDA"):
            make_engine(qwen2_folder, **keys)
    for model in (*others, None):
        assert make_engine(qwen2_folder, model=model).module.head is token_log_probs
