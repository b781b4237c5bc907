"""Tensors as pickles: only the bytes of the view, out of band where the pickle's reader and writer can
(protocol 5, PEP 574), so that an object store takes and maps them without a copy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Shipped:
    """A tensor that pickles as its own bytes and is unpickled as the tensor itself, on the host. A tensor
    read from an out-of-band buffer lies in that buffer, even where Python may only read it.

    Copies (the copy module) share or copy the tensor where it is.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Shipped:
        return Shipped(copy.deepcopy(self.tensor, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # An empty tensor that came from NumPy has a stride of 0, which view refuses
        flat = self.tensor.detach().cpu().contiguous().view(-1) if self.tensor.numel() else torch.empty(0)
        data: Any = flat.view(torch.uint8).numpy()
        buffer = pickle.PickleBuffer(data) if protocol >= 5 else bytearray(data)
        return tensor_on, (buffer, self.tensor.dtype, tuple(self.tensor.shape))


def unwrap(value: Any) -> Any:
    """The tensor in a state: after a trip the state holds it itself, after a mere copy still Shipped."""
    return value.tensor if isinstance(value, Shipped) else value


def tensor_on(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor that lies in `buffer`."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.asarray(_Memory(buffer))).view(dtype).view(shape)


class _Memory:
    """The bytes of a buffer as NumPy's array interface has them, always writable: torch has no read-only
    tensors and warns of read-only arrays. Who hands such a tensor on says that it is borrowed."""

    def __init__(self, buffer: Any) -> None:
        self.owner = np.frombuffer(buffer, dtype=np.uint8)
        interface: Mapping[str, Any] = self.owner.__array_interface__
        address, _ = interface["data"]
        self.__array_interface__ = {**interface, "data": (address, False)}
