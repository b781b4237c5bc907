"""From the host to the device, without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy in the order of what the device is given to do. On a CPU it is the array itself, which must
    not change afterwards."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from other memory is waited for
    return tensor.to(device, non_blocking=True)
