"""The choice of an attention kernel, and the arguments that each kernel gets."""

import inspect
import sys
from importlib import metadata
from types import ModuleType

import pytest
import torch

from tandem.errors import ConfigError
from tandem.models import attention, attention_kernels
from tandem.models.attention import PACKED, attention_name, packed_attention
from tandem.models.attention_kernels import PACKAGES, choose_kernel, make_kernel, torch_varlen
from tandem.models.packing import Packing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTHS = [5, 1, 9]


# Signatures of the packages' functions, with the defaults that matter.


def version_2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
): ...


def version_3(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
): ...


def version_4(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    mask_mod=None,
    block_sparse_tensors=None,
    cu_total_m_blocks=None,
    cu_total_n_blocks=None,
    aux_tensors=None,
    return_lse=False,
): ...


FAKED = {"flash_attention_2": version_2, "flash_attention_3": version_3, "flash_attention_4": version_4}


@pytest.fixture
def installed(monkeypatch):
    """Pretend that packages are installed and that there is a GPU of some generation; record the calls."""

    def of(*names, major=9):
        calls = []

        def found(distribution):
            if distribution not in [PACKAGES[name].distribution for name in names]:
                raise metadata.PackageNotFoundError(distribution)

        monkeypatch.setattr(attention_kernels.metadata, "distribution", found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        for name in names:
            signature = inspect.signature(FAKED[name])

            def attend(*args, _name=name, _signature=signature, **kwargs):
                bound = _signature.bind(*args, **kwargs)
                bound.apply_defaults()
                calls.append((_name, bound.arguments))
                out = torch.full_like(bound.arguments["q"], 7.0)
                return (out, torch.zeros(3)) if _name == "flash_attention_4" else out

            module = ModuleType(PACKAGES[name].module)
            module.flash_attn_varlen_func = attend
            if "." in PACKAGES[name].module:
                sys.modules.setdefault("flash_attn", ModuleType("flash_attn"))
            monkeypatch.setitem(sys.modules, PACKAGES[name].module, module)
        return calls

    yield of
    if not hasattr(sys.modules.get("flash_attn"), "__file__"):
        sys.modules.pop("flash_attn", None)


def heads(count):
    return torch.randn(sum(LENGTHS), count, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", FAKED)
def test_what_a_package_is_handed(installed, name):
    calls = installed(name)
    rows, packing = [heads(4), heads(2), heads(2)], Packing(LENGTHS, CPU)
    out = make_kernel(name)(rows, packing, 0.3)
    assert torch.equal(out, torch.full_like(rows[0], 7.0))
    ((called, given),) = calls
    assert called == name
    assert all(given[letter] is row for letter, row in zip("qkv", rows, strict=True))
    assert given["cu_seqlens_q"].tolist() == given["cu_seqlens_k"].tolist() == [0, 5, 6, 15]
    assert given["cu_seqlens_q"].dtype == torch.int32
    assert given["max_seqlen_q"] == given["max_seqlen_k"] == 9
    assert given["softmax_scale"] == 0.3 and given["causal"] is True and given["deterministic"] is False
    others = inspect.signature(FAKED[name]).parameters
    said = {"q", "k", "v", "softmax_scale", "causal", "deterministic", *(n for n in others if "seqlen" in n)}
    assert all(given[name] == others[name].default for name in others if name not in said)


def test_deterministic_kernels_are_asked_for_where_pytorch_is(installed):
    calls = installed("flash_attention_3")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        make_kernel("flash_attention_3")([heads(2)] * 3, Packing(LENGTHS, CPU), 1.0)
    finally:
        torch.use_deterministic_algorithms(before)
    assert calls[0][1]["deterministic"] is True


def test_pytorchs_own_is_handed_the_same(monkeypatch):
    calls = []

    def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        calls.append((cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa))
        return query

    monkeypatch.setattr(attention_kernels.varlen, "varlen_attn", attend)
    monkeypatch.setattr(attention_kernels, "_VARLEN_OPTIONS", inspect.signature(attend).parameters)
    packing = Packing(LENGTHS, CPU)
    torch_varlen([heads(4), heads(2), heads(2)], packing, 0.3)
    torch_varlen([heads(4)] * 3, packing, 0.3)
    seqlens = packing.cu_seqlens
    assert [call[2:] for call in calls] == [
        (9, 9, 0.3, (-1, 0), True),
        (9, 9, 0.3, (-1, 0), False),
    ]
    assert all(call[0] is seqlens and call[1] is seqlens for call in calls)


@pytest.mark.parametrize(
    ("names", "major", "width", "chosen"),
    [
        ((), 9, 128, "torch"),
        (("flash_attention_2",), 9, 128, "torch"),
        (("flash_attention_4",), 9, 128, "flash_attention_4"),
        (("flash_attention_2", "flash_attention_3", "flash_attention_4"), 9, 64, "flash_attention_3"),
        (("flash_attention_3", "flash_attention_4"), 10, 128, "flash_attention_4"),
        (("flash_attention_3",), 10, 128, "torch"),
        (("flash_attention_3", "flash_attention_4"), 8, 128, "torch"),
        (("flash_attention_3", "flash_attention_4"), 9, 32, "torch"),
    ],
)
def test_auto_takes_the_best_that_is_there(installed, names, major, width, chosen):
    installed(*names, major=major)
    assert choose_kernel("auto", CUDA, width) == chosen
    assert choose_kernel("torch", CUDA, width) == "torch"
    assert choose_kernel("auto", CPU, width) == "torch"


def test_what_is_asked_for_and_cannot_be_had(installed):
    installed("flash_attention_3", major=9)
    with pytest.raises(ConfigError, match="the package flash-attn-4 is not installed") as caught:
        choose_kernel("flash_attention_4", CUDA, 64)
    error = caught.value
    assert (error.field, error.got) == ("model.attn_implementation", "flash_attention_4")
    assert error.expected.startswith("auto, torch, flash_attention_3")
    assert error.remedy == "set model.attn_implementation=auto, or pip install flash-attn-4"
    with pytest.raises(ConfigError, match="only on CUDA devices") as caught:
        choose_kernel("flash_attention_3", CPU, 64)
    assert caught.value.expected == "auto or torch"
    installed("flash_attention_3", major=8)
    with pytest.raises(ConfigError, match="not supported") as caught:
        choose_kernel("flash_attention_3", CUDA, 64)
    assert caught.value.got == "flash_attention_3 on compute capability 8.0"


def test_a_model_is_loaded_with_the_kernel(installed, monkeypatch):
    """The attention has a name that transformers does not take for one of its flash attentions."""
    calls = installed("flash_attention_3")
    assert attention_name("auto", CPU, 64) == attention_name("torch", CUDA, 64) == PACKED
    name = attention_name("auto", CUDA, 64)
    assert name.startswith(PACKED) and name != PACKED and "flash" not in name
    function = attention.AttentionInterface()[name]
    rows = [heads(count).unsqueeze(0).transpose(1, 2) for count in (4, 2, 2)]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    out, _ = function(torch.nn.Identity(), *rows, None, packing=Packing(LENGTHS, CPU), scaling=0.3)
    assert out.shape == (1, sum(LENGTHS), 4, 64) and [name for name, _ in calls] == ["flash_attention_3"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_gives_what_pytorch_gives(name):
    """Compare forward and backward, if the package is installed."""
    try:
        choose_kernel(name, CUDA, 128)
    except ConfigError as error:
        pytest.skip(str(error))
    lengths, draw = [700, 1, 129, 3000], torch.Generator("cuda").manual_seed(0)
    shapes = [(1, count, sum(lengths), 128) for count in (12, 2, 2)]
    inputs = [
        torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]
    packing, found = Packing(lengths, CUDA), {}
    for kernel in (name, "torch"):
        out, _ = packed_attention(
            torch.nn.Identity(), *inputs, None, packing=packing, kernel=make_kernel(kernel)
        )
        direction = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        found[kernel] = [out, *torch.autograd.grad(out, inputs, direction.to(out.dtype))]
    for ours, other in zip(found[name], found["torch"], strict=True):
        assert (ours - other).float().norm() <= 0.02 * other.float().norm()
