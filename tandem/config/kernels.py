"""What the choice of kernels asks of the device, where `trainer.device` names one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.config.rule import Rule
from tandem.config.schema import value_at
from tandem.config.section import Section
from tandem.errors import ConfigError

_ON_CUDA = ("triton", "liger")


def liger(at: str) -> Rule[Any]:
    """Liger's kernels, for the model section at path `at`, run on CUDA devices alone."""
    name = f"{at}.use_liger"

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        if value_at(config, name) and value_at(config, "trainer.device") == "cpu":
            yield ConfigError(
                "Liger's kernels run on CUDA devices alone",
                field=name,
                got="true with trainer.device=cpu",
                remedy=f"set {name}=false, or trainer.device=cuda",
            )

    return Rule((name, "trainer.device"), check)


def fused_head(at: str) -> Rule[Any]:
    """The kernels of the policy's head, whose model section lies at path `at`."""
    switch, backend = f"{at}.use_fused_kernels", f"{at}.fused_kernel_options.impl_backend"

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError | str]:
        asked = value_at(config, backend)
        if not value_at(config, switch):
            return
        if value_at(config, "trainer.device") == "cpu" and asked in _ON_CUDA:
            yield ConfigError(
                "these kernels run on CUDA devices alone",
                field=backend,
                got=f"{asked} with trainer.device=cpu",
                expected="auto or torch",
                remedy=f"set {backend}=auto, or trainer.device=cuda",
            )
        elif asked == "torch" or value_at(config, "trainer.device") == "cpu":
            yield f"{switch}=true: no effect; the head is PyTorch's, fused tile by tile, without it too."

    return Rule((switch, backend, "trainer.device"), check)
