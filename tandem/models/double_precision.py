"""A context in which a model computes in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def double_precision() -> Iterator[None]:
    """Make a model compute in float64 inside the context, even where it would use a narrower dtype.

    Inside, the random generator starts from a fixed seed. Afterwards the dtype settings and the generator are
    restored.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]), _Double():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)


class _Double(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            return args[0].double()
        wide = {name: torch.float64 if _is_narrow(value) else value for name, value in (kwargs or {}).items()}
        return func(*(torch.float64 if _is_narrow(value) else value for value in args), **wide)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW
