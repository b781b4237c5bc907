"""GPU kernels for causal attention over packed sequences.

The kernels are named as in transformers. PyTorch's kernel is available too.

Shapes: N packed tokens; H query heads, K key and value heads, D features of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from tandem.errors import ConfigError
from tandem.models.packing import Packing
from tandem.models.rectangles import Scores

AUTO, TORCH = "auto", "torch"
_FIELD = "model.attn_implementation"
_VARLEN_OPTIONS = inspect.signature(varlen.varlen_attn).parameters


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel for attention over packed sequences in bf16 or fp16.

    Attributes:
        attend: returns the output (N, H, D) for a list of query (N, H, D), key and value (N, K, D); the
            packing; and how weights follow from scores.
        windows: whether the kernel has sliding windows.
        caps: whether the kernel has soft caps.
    """

    attend: Callable[[Sequence[Tensor], Packing, Scores], Tensor]
    windows: bool
    caps: bool

    def takes(self, scores: Scores) -> bool:
        """Return whether the kernel computes these scores. No kernel has sinks."""
        return scores.sinks_H is None and not (
            (scores.window and not self.windows) or (scores.softcap and not self.caps)
        )


def _attend_by_torch(rows: Sequence[Tensor], packing: Packing, scores: Scores) -> Tensor:
    q_NHD, k_NKD, v_NKD = rows
    options: dict[str, Any] = {"scale": scores.scale}
    before = scores.window - 1
    options |= {"window_size": (before, 0)} if "window_size" in _VARLEN_OPTIONS else {"is_causal": True}
    if q_NHD.shape[1] != k_NKD.shape[1] and "enable_gqa" in _VARLEN_OPTIONS:
        options["enable_gqa"] = True
    seqlens, longest = packing.cu_seqlens, packing.max_length
    varlen_attention: Any = varlen.varlen_attn
    out: Tensor = varlen_attention(q_NHD, k_NKD, v_NKD, seqlens, seqlens, longest, longest, **options)
    return out


torch_varlen = Kernel(_attend_by_torch, windows="window_size" in _VARLEN_OPTIONS, caps=False)
"""PyTorch's `varlen_attn`, which uses the kernels of FlashAttention 2."""


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package whose function `flash_attn_varlen_func` computes attention over packed sequences.

    Attributes:
        module: the Python module that has the function.
        distribution: the name of the distribution on PyPI. It is needed because two distributions have a
            module `flash_attn`.
        generations: the major compute capabilities of the supported GPUs.
        install: the command that installs the package.
    """

    module: str
    distribution: str
    generations: tuple[int, ...]
    install: str

    @property
    def installed(self) -> bool:
        """Whether the package is installed."""
        try:
            metadata.distribution(self.distribution)
        except metadata.PackageNotFoundError:
            return False
        return True

    def kernel(self) -> Kernel:
        """Return the package's kernel, set up for causal attention."""
        attend: Any = import_module(self.module).flash_attn_varlen_func

        def call(rows: Sequence[Tensor], packing: Packing, scores: Scores) -> Tensor:
            window = {"window_size": (scores.window - 1, 0)} if scores.window else {}
            out = attend(
                *rows,
                cu_seqlens_q=packing.cu_seqlens,
                cu_seqlens_k=packing.cu_seqlens,
                max_seqlen_q=packing.max_length,
                max_seqlen_k=packing.max_length,
                softmax_scale=scores.scale,
                softcap=scores.softcap,
                **window,
                causal=True,
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
            found: Tensor = (
                out[0] if isinstance(out, tuple) else out
            )  # version 4 also returns the log normalizers
            return found

        return Kernel(call, windows=True, caps=True)


PACKAGES = {
    "flash_attention_2": Package("flash_attn", "flash-attn", (8, 9, 10, 12), "pip install flash-attn"),
    "flash_attention_3": Package(
        "flash_attn_interface", "flash-attn-3", (9,), "build hopper/ of github.com/Dao-AILab/flash-attention"
    ),
    "flash_attention_4": Package("flash_attn.cute", "flash-attn-4", (9, 10), "pip install flash-attn-4"),
}
# The preferred kernels by GPU generation, best first. PyTorch's kernel is as good as flash_attention_2. The
# order is not measured.
_BETTER = {9: ("flash_attention_3", "flash_attention_4"), 10: ("flash_attention_4",)}
_WIDTHS = (64, 96, 128)  # head widths that all packages support


def choose_kernel(name: str, device: torch.device, head_width: int) -> str:
    """Choose the attention kernel for a device and return the kernel's name.

    "auto" chooses the best installed kernel that supports the GPU and the head width. If no such kernel is
    installed, "auto" chooses "torch", PyTorch's kernel.

    Args:
        name: the kernel that the config names.
        device: the device on which the model runs.
        head_width: the number of features of an attention head.

    Raises:
        ConfigError: If the kernel does not run on the device, or its package is not installed.
    """
    if name not in (AUTO, TORCH):
        _check(name, device)
        return name
    if name == TORCH or device.type != "cuda" or head_width not in _WIDTHS:
        return TORCH
    major, _ = torch.cuda.get_device_capability(device)
    return next((better for better in _BETTER.get(major, ()) if PACKAGES[better].installed), TORCH)


def make_kernel(name: str) -> Kernel:
    """Return the kernel with a name that `choose_kernel` returned."""
    return torch_varlen if name == TORCH else PACKAGES[name].kernel()


def _check(name: str, device: torch.device) -> None:
    package = PACKAGES[name]
    here = [other for other, another in PACKAGES.items() if another.installed]
    expected = f"{AUTO}, {TORCH}" + "".join(f", {other}" for other in here) + " (available here)"
    problem, got = "", name
    if device.type != "cuda":
        problem, got = "these kernels run only on CUDA devices", f"{name} on {device.type}"
        expected = f"{AUTO} or {TORCH}"
    elif not package.installed:
        problem = f"the package {package.distribution} is not installed"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        if major not in package.generations:
            problem, got = (
                "these kernels do not support this GPU",
                f"{name} on compute capability {major}.{minor}",
            )
    if problem:
        remedy = f"set {_FIELD}={AUTO}" + ("" if package.installed else f", or {package.install}")
        raise ConfigError(problem, field=_FIELD, got=got, expected=expected, remedy=remedy)
