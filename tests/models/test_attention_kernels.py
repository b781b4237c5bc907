"""The choice of an attention kernel, and the arguments that each kernel gets."""

import sys
from ast import literal_eval
from contextlib import nullcontext
from importlib import metadata
from inspect import Parameter, Signature, signature
from types import ModuleType

import pytest
import torch
from transformers import AttentionInterface

from tandem.engines.train.deterministic import deterministic_kernels
from tandem.errors import ConfigError
from tandem.models import attention_kernels
from tandem.models.attention import PACKED, attention_name, packed_attention
from tandem.models.attention_kernels import PACKAGES, choose_kernel, make_kernel, torch_varlen
from tandem.models.masks import Mask
from tandem.models.packing import Packing
from tandem.models.rectangles import Scores

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTHS = [5, 1, 9]

FIRST = "q k v cu_seqlens_q{0} cu_seqlens_k{0} max_seqlen_q{0} max_seqlen_k{0} "
PARAMETERS = {
    "flash_attention_2": FIRST.format("")
    + "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False block_table=None",
    "flash_attention_3": FIRST.format("")
    + "seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None q_descale=None k_descale=None "
    "v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None "
    "deterministic=False sm_margin=0 return_attn_probs=False",
    "flash_attention_4": FIRST.format("=None")
    + "seqused_q=None seqused_k=None page_table=None softmax_scale=None causal=False window_size=(None,None) "
    "learnable_sink=None softcap=0.0 num_splits=1 pack_gqa=None deterministic=False score_mod=None "
    "mask_mod=None block_sparse_tensors=None cu_total_m_blocks=None cu_total_n_blocks=None aux_tensors=None "
    "return_lse=False",
}
"""Parameters of the packages' functions, with their defaults."""


def parameter(word):
    name, _, value = word.partition("=")
    default = literal_eval(value) if value else Parameter.empty
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default)


FAKED = {name: Signature([parameter(word) for word in words.split()]) for name, words in PARAMETERS.items()}


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

            def attend(*args, _name=name, **kwargs):
                bound = FAKED[_name].bind(*args, **kwargs)
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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scores", [Scores(0.3), Scores(0.3, window=4, softcap=2.0)])
@pytest.mark.parametrize("name", FAKED)
def test_what_a_package_is_handed(installed, name, scores, deterministic):
    calls = installed(name)
    rows, packing = [heads(4), heads(2), heads(2)], Packing(LENGTHS, CPU)
    with deterministic_kernels() if deterministic else nullcontext():
        out = make_kernel(name).attend(rows, packing, scores)
    assert torch.equal(out, torch.full_like(rows[0], 7.0))
    ((called, given),) = calls
    assert called == name
    assert all(given[letter] is row for letter, row in zip("qkv", rows, strict=True))
    seqlens = [given["cu_seqlens_q"], given["cu_seqlens_k"]]
    assert all(part.tolist() == [0, 5, 6, 15] and part.dtype == torch.int32 for part in seqlens)
    said = {"max_seqlen_q": 9, "max_seqlen_k": 9, "softmax_scale": 0.3, "causal": True}
    said |= {"deterministic": deterministic, "softcap": scores.softcap}
    said |= {"window_size": (3, 0)} if scores.window else {}
    defaults = {n: p.default for n, p in FAKED[name].parameters.items() if n not in ("q", "k", "v")}
    others = {n: value for n, value in given.items() if n in defaults and "cu_seqlens" not in n}
    assert others == {n: value for n, value in defaults.items() if n in others} | said


def test_pytorchs_own_is_handed_the_same(monkeypatch):
    calls = []

    def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert cu_seq_q is cu_seq_k is packing.cu_seqlens
        calls.append((max_q, max_k, scale, window_size, enable_gqa))
        return query

    monkeypatch.setattr(attention_kernels.varlen, "varlen_attn", attend)
    monkeypatch.setattr(attention_kernels, "_VARLEN_OPTIONS", signature(attend).parameters)
    packing = Packing(LENGTHS, CPU)
    for key_heads, window in ((2, 0), (4, 4)):
        rows = [heads(4), heads(key_heads), heads(key_heads)]
        torch_varlen.attend(rows, packing, Scores(0.3, window))
    assert calls == [(9, 9, 0.3, (-1, 0), True), (9, 9, 0.3, (3, 0), False)]
    assert not torch_varlen.takes(Scores(1.0, softcap=2.0))
    assert not torch_varlen.takes(Scores(1.0, sinks_H=torch.ones(4)))


@pytest.mark.parametrize(
    ("versions", "major", "width", "chosen"),
    [
        *(("", 9, 128, "torch"), ("2", 9, 128, "torch"), ("4", 9, 128, "flash_attention_4")),
        *(("234", 9, 64, "flash_attention_3"), ("34", 10, 128, "flash_attention_4")),
        *(("3", 10, 128, "torch"), ("34", 8, 128, "torch"), ("34", 9, 32, "torch")),
    ],
)
def test_auto_takes_the_best_that_is_there(installed, versions, major, width, chosen):
    installed(*(f"flash_attention_{version}" for version in versions), major=major)
    assert choose_kernel("auto", CUDA, width) == chosen
    assert choose_kernel("torch", CUDA, width) == "torch"
    assert choose_kernel("auto", CPU, width) == "torch"


@pytest.mark.parametrize(
    ("name", "device", "major", "got", "remedy"),
    [
        ("flash_attention_4", CUDA, 9, "", "pip install flash-attn-4"),
        ("flash_attention_3", CPU, 9, "on cpu", "attn_implementation=auto"),
        ("flash_attention_3", CUDA, 8, "compute capability 8.0", "attn_implementation=auto"),
    ],
)
def test_what_is_asked_for_and_cannot_be_had(installed, name, device, major, got, remedy):
    installed("flash_attention_3", major=major)
    with pytest.raises(ConfigError) as caught:
        choose_kernel(name, device, 64)
    assert caught.value.field == "model.attn_implementation" and caught.value.got.startswith(name)
    assert got in caught.value.got and remedy in caught.value.remedy


def test_a_model_is_loaded_with_the_kernel(installed, monkeypatch):
    """The attention has a name that transformers does not take for one of its flash attentions."""
    calls = installed("flash_attention_3")
    assert attention_name("auto", CPU, 64) == attention_name("torch", CUDA, 64) == PACKED
    name = attention_name("auto", CUDA, 64)
    assert name.startswith(PACKED) and name != PACKED and "flash" not in name
    rows = [heads(count).unsqueeze(0).transpose(1, 2) for count in (4, 2, 2)]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    function, packing = AttentionInterface()[name], Packing(LENGTHS, CPU)
    out, _ = function(torch.nn.Identity(), *rows, Mask(packing), scaling=0.3)
    assert out.shape == (1, sum(LENGTHS), 4, 64) and [name for name, _ in calls] == ["flash_attention_3"]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_gives_what_pytorch_gives(name, window):
    """Compare forward and backward, if the package is installed."""
    try:
        choose_kernel(name, CUDA, 128)
    except ConfigError as error:
        pytest.skip(str(error))
    lengths, found = [700, 1, 129, 3000], {}
    draw = torch.Generator("cuda").manual_seed(0)
    options = {"generator": draw, "device": "cuda", "dtype": torch.bfloat16}
    inputs = [torch.randn(1, n, sum(lengths), 128, **options).requires_grad_() for n in (12, 2, 2)]
    direction = torch.randn(1, sum(lengths), 12, 128, **options)
    for kernel in (name, "torch"):
        mask = Mask(Packing(lengths, CUDA), window)
        out, _ = packed_attention(torch.nn.Identity(), *inputs, mask, kernel=make_kernel(kernel))
        found[kernel] = [out, *torch.autograd.grad(out, inputs, direction)]
    for ours, other in zip(found[name], found["torch"], strict=True):
        assert (ours - other).float().norm() <= 0.02 * other.float().norm()
