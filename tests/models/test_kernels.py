"""The choice of a model's kernels. Other files test what the kernels compute."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tandem.config.fsdp import FSDPConfig
from tandem.models import heads, kernels
from tandem.models.kernels import Kernels, choose_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def installed(monkeypatch):
    """Pretend that packages are installed, and record which kernels would be put into a model."""
    done = []
    monkeypatch.setattr(kernels, "use_liger", lambda model, device: done.append("use_liger"))
    monkeypatch.setattr(kernels, "patch", lambda model: done.append("patch"))
    monkeypatch.setattr(kernels, "knows", lambda model: model == "known")
    fused = SimpleNamespace(fuse=lambda model: done.append("fuse") or (model != "strange"))
    monkeypatch.setitem(sys.modules, "tandem.models.fused", fused)

    def of(*packages):
        for module in (kernels, heads):
            monkeypatch.setattr(module, "find_spec", lambda name: name if name in packages else None)
        return done

    return of


BOTH = ("triton", "liger_kernel")
FP64 = {"model_dtype": "fp64", "dtype": "fp64"}


@pytest.mark.parametrize(
    ("packages", "model", "asked", "device", "options", "found", "done"),
    [
        (BOTH[:1], "known", None, CUDA, {}, "triton", ["fuse"]),
        (BOTH[:1], "strange", None, CUDA, {}, "transformers", ["fuse"]),
        ((), "known", None, CUDA, {}, "transformers", []),
        (BOTH, "known", None, CUDA, {}, "liger", ["patch"]),
        (BOTH, "other", None, CUDA, {}, "triton", ["fuse"]),
        (BOTH, "known", None, CUDA, {"full_determinism": True}, "triton", ["fuse"]),
        (BOTH, "known", None, CUDA, FP64, "triton", ["fuse"]),
        (BOTH, "known", None, CUDA, {"use_torch_compile": True}, "compiled", []),
        (BOTH, "known", False, CUDA, {}, "transformers", []),
        (BOTH, "known", None, CPU, {}, "transformers", []),
        (BOTH, "other", True, CUDA, {}, "liger", ["use_liger"]),
    ],
)
def test_what_is_chosen(packages, model, asked, device, options, found, done, installed):
    recorded = installed(*packages)
    assert choose_kernels(model, asked, device, FSDPConfig(**options)) == found
    assert recorded == done


def test_the_head_that_auto_means(installed):
    installed("triton")
    names = [heads.head_name(*case) for case in (("auto", CUDA), ("auto", CPU), ("torch", CUDA))]
    installed()
    assert [*names, heads.head_name("auto", CUDA)] == ["triton", "torch", "torch", "torch"]


def test_kernels_of_a_model():
    words = str(Kernels("triton", "triton"))
    assert "log-probs by Triton's kernels" in words and "fused Triton kernels" in words
    assert [Kernels(name).fused for name in ("liger", "triton", "compiled")] == [True, True, False]
