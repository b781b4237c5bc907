"""Fusers, which combine several kernels into few, in a model's layers and in its head.

The tables say what each fuser fuses, what it needs, and what it excludes. The rules of the config and the
engines read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.config.fsdp import FSDPConfig


@dataclass(frozen=True)
class Exclusion:
    """A key of `fsdp_config` that cannot be combined with a fuser.

    In the texts, `{key}` and `{value}` stand for this key and its value, `{fuser}` and `{asked}` for the key
    and value that request the fuser, and `{plain}` for a value of that key that does not.

    Attributes:
        key: the name of the key.
        excludes: returns whether a value of the key excludes the fuser.
        problem: the message of the error.
        remedy: as in `ConfigError`.
        field: as in `ConfigError`.
        got: as in `ConfigError`.
        expected: as in `ConfigError`.
    """

    key: str
    excludes: Callable[[Any], bool]
    problem: str
    remedy: str
    field: str = "{key}"
    got: str = "{value} with {fuser}={asked}"
    expected: str | None = None


@dataclass(frozen=True)
class Fuser:
    """A way to compute layers or log-probs.

    Attributes:
        words: how messages describe it.
        packages: the packages that it needs, on CUDA devices only.
        install: how to install them.
        exclusions: what it cannot be combined with.
    """

    words: str
    packages: tuple[str, ...] = ()
    install: str = ""
    exclusions: tuple[Exclusion, ...] = ()

    def excluded(self, fsdp: FSDPConfig) -> list[Exclusion]:
        """Return the exclusions that apply to these settings."""
        return [rule for rule in self.exclusions if rule.excludes(getattr(fsdp, rule.key))]


_OF_LIGER = (
    Exclusion(
        "full_determinism",
        bool,
        "Liger's kernels do not guarantee the same bits in every run",
        "set {fuser}={plain}, or {key}=false",
    ),
    Exclusion(
        "dtype",
        lambda dtype: dtype == "fp64",
        "Liger's kernels do not compute in double precision",
        "set {fuser}={plain}, or {key}=fp32",
        expected="auto, bf16 or fp32",
    ),
)
_LIGER_OR_COMPILER = Exclusion(
    "use_torch_compile",
    bool,
    "torch.compile and Liger's kernels both fuse the same operations",
    "set one of the two to false",
)
_NOT_SPLIT = Exclusion(
    "tensor_parallel_size",
    lambda size: size > 1,
    "layers that are split over devices exchange sums between devices, which torch.compile cannot compile",
    "set {fuser}={plain}, or {key}=1",
    field="{fuser}",
    got="{asked} with {key}={value}",
)

LAYERS = {
    "liger": Fuser(
        "norms, gates and rotary embeddings by Liger's kernels",
        ("liger_kernel",),
        "pip install 'liger-kernel>=0.8.5'",
        (_LIGER_OR_COMPILER, *_OF_LIGER),
    ),
    "triton": Fuser("norms and gates by fused Triton kernels", ("triton",)),
    "compiled": Fuser("layers by torch.compile", exclusions=(_NOT_SPLIT,)),
    "transformers": Fuser("layers by transformers"),
}
"""The fusers of norms, gated layers and rotary embeddings."""

HEADS = {
    "torch": Fuser("PyTorch's operators"),
    "triton": Fuser("Triton's kernels", ("triton",), "install PyTorch's CUDA build, which brings Triton"),
    "liger": Fuser(
        "Liger's kernels", ("liger_kernel",), "pip install 'liger-kernel[cutedsl]>=0.8.5'", _OF_LIGER
    ),
}
"""The fusers of log-probs."""
