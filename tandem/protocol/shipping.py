"""Pickle tensors as raw bytes, without copies where possible.

Only the bytes of a tensor's view are pickled, not its whole storage. With pickle protocol 5 (PEP 574), the
bytes are passed out of band, so that an object store can map them without a copy.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Shipped:
    """A wrapper of a tensor that is pickled as raw bytes and unpickled as a CPU tensor.

    A tensor that was read from an out-of-band buffer uses the memory of the buffer, even if Python treats the
    buffer as read-only. Copies made by the copy module share or copy the tensor on its own device.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Shipped:
        return Shipped(copy.deepcopy(self.tensor, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # An empty tensor from NumPy has a stride of 0, for which view() raises an error
        flat = self.tensor.detach().cpu().contiguous().view(-1) if self.tensor.numel() else torch.empty(0)
        data: Any = flat.view(torch.uint8).numpy()
        buffer = pickle.PickleBuffer(data) if protocol >= 5 else bytearray(data)
        return tensor_on, (buffer, self.tensor.dtype, tuple(self.tensor.shape))


def unwrap(value: Any) -> Any:
    """Return the tensor in a value of an unpickled or copied state.

    After unpickling, the value is the tensor itself. After a copy with the copy module, it is a `Shipped`.
    """
    return value.tensor if isinstance(value, Shipped) else value


def tensor_on(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that uses the memory of `buffer`."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.asarray(_Memory(buffer))).view(dtype).view(shape)


class _Memory:
    """The bytes of a buffer as a NumPy array interface that is always writable.

    PyTorch has no read-only tensors and warns about read-only arrays. Code that returns a tensor of such
    memory must mark the memory as borrowed.
    """

    def __init__(self, buffer: Any) -> None:
        self.owner = np.frombuffer(buffer, dtype=np.uint8)
        interface: Mapping[str, Any] = self.owner.__array_interface__
        address, _ = interface["data"]
        self.__array_interface__ = {**interface, "data": (address, False)}
