"""A factory for `Ops`. Inside this package, the name `torch` refers to a submodule, not to PyTorch."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from torch import float64

from tandem.engines.rollout.native.kernels import load_kernels
from tandem.engines.rollout.native.ops.base import Heads, Ops
from tandem.engines.rollout.native.ops.cpu import CPUOps
from tandem.engines.rollout.native.ops.torch import TorchOps


def make_ops(heads: Heads, eps: float) -> Ops:
    """Return the fastest implementation for the device and dtype of the model.

    The device and the dtype are those of the rotary tables in `heads`.
    """
    device, dtype = heads.cos_PD.device, heads.cos_PD.dtype
    if device.type == "cuda" and dtype != float64 and find_spec("triton"):
        made: Ops = import_module("tandem.engines.rollout.native.ops.triton").TritonOps(heads, eps)
        return made
    kernels = load_kernels(dtype) if device.type == "cpu" else None
    return TorchOps(heads, eps) if kernels is None else CPUOps(heads, eps, kernels)
