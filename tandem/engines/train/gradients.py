"""Functions for the gradient of a whole sharded model: norm, clipping, and a check that it is finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tandem.errors import NonFiniteError
from tandem.models.tensor_group import local

_PIECE = 2**16


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of the whole gradient, with each element of the gradient counted once.

    Parameters may be on different device meshes, or on no mesh. On a mesh, they may be sharded over some
    dimensions and replicated over others. This function is collective over these meshes. Every rank must pass
    the same parameters in the same order.

    Returns:
        A float64 scalar on the gradients' device. Nothing is copied to the host.
    """
    by_layout: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_layout.setdefault(_layout(parameter.grad), []).append(local(parameter.grad))
    squares = []
    for (mesh, dimensions), gradients in by_layout.items():
        # On a CPU, the norm of a long tensor is inaccurate in fp32 and slow in fp64, so it is computed in
        # pieces.
        if gradients[0].device.type == "cpu":
            pieces = [piece for gradient in gradients for piece in torch.split(gradient.reshape(-1), _PIECE)]
            norms = torch._foreach_norm(pieces, 2)
        else:
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
        square = torch.stack(norms).double().square().sum()
        for dimension in dimensions:
            assert mesh is not None
            if mesh.size(dimension) > 1:
                dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _layout(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return the mesh of a gradient, and the mesh dimensions over which the gradient is sharded."""
    if not isinstance(gradient, DTensor):
        return None, ()
    assert not any(placement.is_partial() for placement in gradient.placements), "gradient is not reduced"
    divided = [at for at, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return gradient.device_mesh, tuple(divided)


def clip(parameters: Iterable[Tensor], norm: Tensor, longest: float) -> None:
    """Scale the gradients in place so that their norm is at most `longest`.

    Args:
        parameters: the parameters whose gradients are scaled.
        norm: the norm of the gradients.
        longest: the maximum norm.
    """
    scale(parameters, (longest / (norm + 1e-6)).clamp(max=1.0))


def scale(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients in place by a factor."""
    if not isinstance(factor, Tensor) and factor == 1:
        return
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if isinstance(factor, Tensor):
        factor = factor.to(gradients[0].dtype)
    torch._foreach_mul_(gradients, factor)


def check_finite(loss: Tensor, norm: Tensor) -> None:
    """Check that the loss and the gradient norm are finite, with a single copy to the host.

    Raises:
        NonFiniteError: the loss or the gradient norm is NaN or infinite.
    """
    values = torch.stack([loss, norm.to(loss.dtype)]).tolist()
    for name, value in zip(("loss", "gradient norm"), values, strict=True):
        if not math.isfinite(value):
            raise NonFiniteError(
                f"the {name} is not finite; no weight has changed",
                field=name,
                got=value,
                expected="a finite number",
            )
