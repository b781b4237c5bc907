"""Measures the bytes that decoder layers keep for their backward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tandem.memory.activations import LayerBytes
from tandem.models.activation_offload import outside, part_of

_HIDDEN = "hidden_states"


def run_and_measure(
    layer: nn.Module,
    forward: Any,
    kept: Collection[Any] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, LayerBytes]:
    """Run a layer as in training, and return its output without gradients, and the bytes that it keeps.

    The saved tensors are freed when this function returns. A storage that is saved several times is counted
    once. Parameters, and tensors that all layers share, are not counted.

    Args:
        layer: the layer, whose parameters are gathered.
        forward: the layer's forward function.
        kept: the operators whose outputs the mode "ops" keeps. None: the layer is compiled, and its operators
            are not seen.
        args: arguments of the forward function. The first one is the input (…, D), if there is one.
        kwargs: further arguments of the forward function.
    """
    shared = outside(layer, kwargs if args else {k: v for k, v in kwargs.items() if k != _HIDDEN})
    hidden: Tensor = (args[0] if args else kwargs[_HIDDEN]).detach().requires_grad_()
    saved, products = dict[int, torch.UntypedStorage](), _Products(kept or ())

    def keep(tensor: Tensor) -> Tensor:
        storage = part_of(tensor).untyped_storage()
        if storage.data_ptr() not in shared:
            saved[storage.data_ptr()] = storage
        return tensor

    seen = nullcontext() if kept is None else products
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor), seen:
        out = forward(hidden, *args[1:], **kwargs) if args else forward(**{**kwargs, _HIDDEN: hidden})
    sizes = {address: storage.nbytes() for address, storage in saved.items()}
    both = sum(sizes.get(address, 0) for address in products.found)
    made = sum(storage.nbytes() for storage in products.found.values())
    found = LayerBytes(hidden.nbytes, sum(sizes.values()), made, both)
    return tree_map_only(Tensor, Tensor.detach, out), found


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of the storages that some operators return."""

    def __init__(self, operators: Collection[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = frozenset(operators)
        self.found: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self._operators:
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    storage = part_of(tensor).untyped_storage()
                    self.found[storage.data_ptr()] = storage
        return out
