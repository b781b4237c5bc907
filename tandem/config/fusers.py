"""Tables of fusers, which combine several kernels into fewer kernels, in a model's layers and its head.

For each fuser, the tables list its operations, its packages, and the settings that it excludes. The config's
rules and the engines read these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.config.fsdp import FSDPConfig


@dataclass(frozen=True)
class Exclusion:
    """A key of `fsdp_config` that cannot be combined with a fuser.

    The texts may contain placeholders. `{key}` and `{value}` are the excluded key and its value. `{fuser}`
    and `{asked}` are the key and value that request the fuser. `{plain}` is a value of this key that does not
    request the fuser.

    Attributes:
        key: the name of the key.
        excludes: returns whether a value of the key excludes the fuser.
        problem: the message of the error.
        remedy: what to do, for the `ConfigError`.
        field: the key, for the `ConfigError`.
        got: the given value, for the `ConfigError`.
        expected: the valid values, for the `ConfigError`.
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
    """A fused implementation of layers or of log-probs.

    Attributes:
        words: the fuser's name in messages.
        packages: the packages that the fuser needs on CUDA devices.
        install: how to install these packages.
        exclusions: the settings that cannot be combined with the fuser.
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
_NOT_SPLIT = tuple(
    Exclusion(
        key,
        lambda size: size > 1,
        f"{what} between devices, which torch.compile cannot compile",
        "set {fuser}={plain}, or {key}=1",
        field="{fuser}",
        got="{asked} with {key}={value}",
    )
    for key, what in (
        ("tensor_parallel_size", "layers that are split over devices exchange sums"),
        ("expert_parallel_size", "experts that are divided over devices exchange tokens"),
    )
)

LAYERS = {
    "liger": Fuser(
        "norms, gates and rotary embeddings by Liger's kernels",
        ("liger_kernel",),
        "pip install 'liger-kernel>=0.8.5'",
        (_LIGER_OR_COMPILER, *_OF_LIGER),
    ),
    "triton": Fuser("norms and gates by fused Triton kernels", ("triton",)),
    "compiled": Fuser("layers by torch.compile", exclusions=_NOT_SPLIT),
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
