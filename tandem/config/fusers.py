"""What makes few kernels of many, in a model's layers and in its head: what each fuses, what it needs, and
what it cannot stand beside. The rules of the config and the engines read these tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.config.fsdp import FSDPConfig


@dataclass(frozen=True)
class Exclusion:
    """A key of `fsdp_config` beside which a fuser cannot stand.

    In the texts `{key}` and `{value}` stand for this key, `{fuser}` and `{asked}` for the one that asks for
    the fuser, and `{plain}` for a value of that one which does not.

    Attributes:
        key: its name.
        excludes: whether a value of it excludes the fuser.
        problem, field, got, expected, remedy: of the error.
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
        words: how the user is told of it.
        packages: it needs; on CUDA devices alone.
        install: how to get them.
        exclusions: what it cannot stand beside.
    """

    words: str
    packages: tuple[str, ...] = ()
    install: str = ""
    exclusions: tuple[Exclusion, ...] = ()

    def excluded(self, fsdp: FSDPConfig) -> list[Exclusion]:
        """Return those of its exclusions that hold."""
        return [rule for rule in self.exclusions if rule.excludes(getattr(fsdp, rule.key))]


_OF_LIGER = (
    Exclusion(
        "full_determinism",
        bool,
        "Liger's kernels do not promise the same bits in every run",
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
    "torch.compile and Liger's kernels would fuse the same operations",
    "set one of the two to false",
)
_NOT_SPLIT = Exclusion(
    "tensor_parallel_size",
    lambda size: size > 1,
    "layers that are split over devices exchange sums within, which torch.compile cannot follow",
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
"""Of norms, gated layers and rotary embeddings."""

HEADS = {
    "torch": Fuser("PyTorch's operators"),
    "triton": Fuser("Triton's kernels", ("triton",), "install PyTorch's CUDA build, which brings Triton"),
    "liger": Fuser(
        "Liger's kernels", ("liger_kernel",), "pip install 'liger-kernel[cutedsl]>=0.8.5'", _OF_LIGER
    ),
}
"""Of log-probs."""
