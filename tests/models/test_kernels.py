"""The choice of a model's kernels. Other files test what the kernels compute."""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tandem.config.fsdp import FSDPConfig
from tandem.errors import ConfigError
from tandem.models import heads, kernels
from tandem.models.kernels import Kernels, choose_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = FSDPConfig()


@pytest.fixture
def patched(monkeypatch):
    """Record which kernels would be put into a model, without changing the model."""
    done = []
    monkeypatch.setattr(kernels, "use_liger", lambda model, device: done.append("use_liger"))
    monkeypatch.setattr(kernels, "patch", lambda model: done.append("patch"))
    monkeypatch.setattr(kernels, "knows", lambda model: model == "known")
    fused = SimpleNamespace(fuse=lambda model: done.append("fuse") or (model != "strange"))
    monkeypatch.setitem(sys.modules, "tandem.models.fused", fused)
    return done


def install(monkeypatch, *packages):
    for module in (kernels, heads):
        monkeypatch.setattr(module, "find_spec", lambda name: name if name in packages else None)


@pytest.mark.parametrize(
    ("packages", "model", "options", "found", "done"),
    [
        (("triton",), "known", {}, "triton", ["fuse"]),
        (("triton",), "strange", {}, "transformers", ["fuse"]),
        ((), "known", {}, "transformers", []),
        (("triton", "liger_kernel"), "known", {}, "liger", ["patch"]),
        (("triton", "liger_kernel"), "other", {}, "triton", ["fuse"]),
        (("triton", "liger_kernel"), "known", {"full_determinism": True}, "triton", ["fuse"]),
        (("triton", "liger_kernel"), "known", {"model_dtype": "fp64", "dtype": "fp64"}, "triton", ["fuse"]),
        (("triton", "liger_kernel"), "known", {"use_torch_compile": True}, "compiled", []),
    ],
)
def test_by_default_on_cuda(packages, model, options, found, done, patched, monkeypatch):
    install(monkeypatch, *packages)
    assert choose_kernels(model, None, CUDA, FSDPConfig(**options)) == found
    assert patched == done


def test_as_asked(patched, monkeypatch):
    install(monkeypatch, "triton", "liger_kernel")
    assert choose_kernels("known", False, CUDA, PLAIN) == "transformers"
    assert choose_kernels("known", None, CPU, PLAIN) == "transformers"
    assert patched == []
    assert choose_kernels("other", True, CUDA, PLAIN) == "liger"
    assert patched == ["use_liger"]


def test_liger_that_is_asked_for_is_refused_on_a_cpu():
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    )
    with pytest.raises(ConfigError, match="only on CUDA devices"):
        choose_kernels(model, True, CPU, PLAIN)


def test_the_head_that_auto_means(monkeypatch):
    install(monkeypatch, "triton")
    assert [heads.head_name("auto", device) for device in (CUDA, CPU)] == ["triton", "torch"]
    assert heads.head_name("torch", CUDA) == "torch"
    install(monkeypatch)
    assert heads.head_name("auto", CUDA) == "torch"


def test_words():
    words = "log-probs by Triton's kernels, norms and gates by fused Triton kernels"
    assert str(Kernels("triton", "triton")) == words
    assert str(Kernels()) == "layers by transformers"
    assert [Kernels(name).fused for name in ("liger", "triton", "compiled")] == [True, True, False]
