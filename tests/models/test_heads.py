import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig, FusedKernelOptions, ModelConfig
from tandem.engines.train.fsdp import FSDPEngine
from tandem.errors import ConfigError
from tandem.models.heads import make_head, tiled, token_log_probs
from tandem.models.linear import wide_product
from tests.support.heads import Largest, check_head, cut, make_case, reference

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 8, 29, 64])
def width(request, monkeypatch):
    cut(monkeypatch, request.param)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 40),
    vocabulary=st.integers(1, 70),
    features=st.integers(1, 20),
    tile=st.integers(1, 80),
    kept=st.sampled_from([0, 1 << 20]),
    temperature=st.floats(0.05, 20.0),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_in_float64(rows, vocabulary, features, tile, kept, temperature, scale, seed):
    hidden, weight, targets = make_case(
        rows, vocabulary, features, torch.float64, scale=scale * temperature, seed=seed
    )
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, tile)
        patch.setattr(tiled, "_KEPT_BYTES", kept)
        largest = (hidden @ weight.T).abs().max().item() / temperature if rows else 0.0
        check_head(token_log_probs, hidden, weight, targets, temperature, 1e-14 * (100 + largest))


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_lower_precision(temperature, dtype, tolerance):
    case = make_case(37, 29, 12, dtype)
    check_head(token_log_probs, *case, temperature, tolerance)


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
    outputs = token_log_probs(hidden, weight, targets, temperature=0.8, with_entropy=True)
    wide = [leaf.detach().clone().requires_grad_() for leaf in (hidden, weight)]
    expected = reference(*wide, targets, 0.8)
    got = torch.autograd.grad(outputs[which].sum(), (hidden, weight))
    for g, w in zip(got, torch.autograd.grad(expected[which].sum(), wide), strict=True):
        assert torch.allclose(g, w, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient_and_the_other_the_same(frozen):
    case = make_case(9, 29, 12, torch.float64)
    leaves = [leaf.detach().clone().requires_grad_(index != frozen) for index, leaf in enumerate(case[:2])]
    for hidden, weight in (case[:2], leaves):
        log_probs, _ = token_log_probs(hidden, weight, case[2], temperature=1.0, with_entropy=False)
        log_probs.sum().backward()
    assert leaves[frozen].grad is None
    assert torch.equal(leaves[1 - frozen].grad, case[1 - frozen].grad)


def test_entropy_only_where_asked_for():
    case = make_case(3, 29, 12, torch.float32)
    log_probs, entropy = token_log_probs(*case, temperature=1.0, with_entropy=False)
    assert entropy is None
    assert torch.equal(log_probs, token_log_probs(*case, temperature=1.0, with_entropy=True)[0])


def test_no_rows():
    hidden, weight, targets = make_case(0, 29, 12, torch.float64)
    log_probs, entropy = token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert weight.grad.abs().sum() == 0 and hidden.grad.shape == (0, 12)


def test_a_distribution_of_one_entry_has_no_entropy():
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    weight, target = torch.tensor([[-1.0], [1.0], [0.0]]), torch.tensor([1])
    log_probs, entropy = token_log_probs(hidden, weight, target, temperature=0.5, with_entropy=True)
    (log_probs + entropy).sum().backward()
    assert (log_probs.item(), entropy.item(), hidden.grad.item()) == (0.0, 0.0, 0.0)


def test_bf16_weight_gradient_is_summed_in_fp32():
    # With 4,096 rows, sums in bf16 would stop growing long before the end.
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(4096, dtype=torch.int64)
    log_probs, _ = token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=False)
    log_probs.sum().backward()
    assert weight.grad.flatten().tolist() == [2048.0, -2048.0]


def test_nothing_is_larger_than_a_tile_or_the_weight():
    hidden, weight, targets = make_case(2048, 16384, 8, torch.bfloat16)
    with Largest() as largest:
        log_probs, entropy = token_log_probs(hidden, weight, targets, temperature=0.9, with_entropy=True)
        torch.autograd.backward((log_probs + entropy).sum())
    assert largest.bytes <= tiled.TILE_BYTES["cpu"] < 2048 * 16384 * 2 / 10


class Products:
    """A counter of the products that compute logits."""

    def __init__(self, monkeypatch):
        self.number = 0
        monkeypatch.setattr(tiled, "wide_product", self)

    def __call__(self, left, right):
        self.number += 1
        return wide_product(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_logits_that_fit_are_made_once_and_change_no_bit(dtype, with_entropy, monkeypatch):
    cut(monkeypatch, 8)
    found = []
    for budget, products in ((37 * 29 * 4, 4), (37 * 29 * 4 - 1, 8)):
        monkeypatch.setattr(tiled, "_KEPT_BYTES", budget)
        counted = Products(monkeypatch)
        hidden, weight, targets = make_case(37, 29, 12, dtype)
        outputs = token_log_probs(hidden, weight, targets, temperature=0.7, with_entropy=with_entropy)
        total = sum((value * torch.arange(37)).sum() for value in outputs if value is not None)
        twice = [torch.autograd.grad(total, (hidden, weight), retain_graph=again) for again in (True, False)]
        assert all(torch.equal(first, second) for first, second in zip(*twice, strict=True))
        assert counted.number == products + (4 if products == 8 else 0)  # the second backward pass
        found.append([*(value for value in outputs if value is not None), *twice[0]])
    assert all(torch.equal(kept, made_again) for kept, made_again in zip(*found, strict=True))


@pytest.mark.parametrize("learns", [True, False])
def test_logits_wait_for_a_backward_pass_alone(learns):
    hidden, weight, targets = make_case(37, 29, 12, torch.float32)
    asked = []

    class Tiles(tiled.TorchTiles):
        def sums(self, *args, keep):
            asked.append(keep)
            return super().sums(*args, keep=keep)

    with torch.set_grad_enabled(learns):
        tiled.tiled_log_probs(Tiles(), hidden, weight, targets, 1.0, True)
    tiled.tiled_log_probs(Tiles(), hidden.detach(), weight.detach(), targets, 1.0, True)
    assert asked == [learns, False]


@pytest.mark.gpu
def test_bf16_logits_on_a_gpu_are_those_of_fp32_sums():
    """If logits of 30 were rounded to bf16, they and the log-probs would have errors of 0.06."""
    hidden, weight, targets = make_case(500, 3000, 64, torch.bfloat16, device="cuda")
    want = reference(hidden, weight, targets, 1.0)
    outputs = token_log_probs(hidden, weight, targets, temperature=1.0, with_entropy=True)
    rounded = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]
    errors = [
        (got - value).abs().max().item()
        for got, value in zip((*outputs, rounded), (*want, want[0]), strict=True)
    ]
    print(f"log-prob {errors[0]:.1e}, entropy {errors[1]:.1e}, of rounded logits {errors[2]:.1e}")
    assert max(errors[:2]) < 1e-4 < 1e-2 < errors[2]
    check_head(token_log_probs, hidden, weight, targets, 1.0, 1e-2)


@pytest.mark.parametrize("name", ["torch", "auto"])
def test_a_cpu_has_the_torch_head(name):
    assert make_head(name, CPU) is token_log_probs


@pytest.mark.parametrize("name", ["triton", "liger"])
def test_kernels_for_cuda_are_refused_on_a_cpu(name):
    with pytest.raises(ConfigError, match="CUDA") as caught:
        make_head(name, CPU)
    assert caught.value.remedy.startswith("set model.fused_kernel_options.impl_backend=auto")


def engine(folder, model):
    return FSDPEngine(folder, model=model, fsdp=FSDPConfig(), optim=None, total_steps=1, device=CPU)


def test_the_engine_takes_the_head_that_the_config_names(qwen2_folder):
    fused = ModelConfig(
        path=str(qwen2_folder), tokenizer_path="", use_fused_kernels=True,
        fused_kernel_options=FusedKernelOptions(impl_backend="triton"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="CUDA"):
        engine(qwen2_folder, fused)
    switched_off = fused.model_copy(update={"use_fused_kernels": False})
    by_default = fused.model_copy(update={"use_fused_kernels": None})
    for model in (switched_off, by_default, BackboneConfig(path=str(qwen2_folder))):
        assert engine(qwen2_folder, model).module.head is token_log_probs


def test_liger_is_refused_on_a_cpu(qwen2_folder):
    with pytest.raises(ConfigError, match="only on CUDA devices") as caught:
        engine(qwen2_folder, BackboneConfig(path=str(qwen2_folder), use_liger=True))
    assert caught.value.remedy == "set use_liger=false"
