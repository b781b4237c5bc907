"""Muon, an optimizer for the matrices of hidden layers that orthogonalizes each momentum update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tandem.models.collectives import CollectiveMeter
from tandem.models.tensor_group import local

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return an approximation of U Vᵀ, where U S Vᵀ is the singular value decomposition of the matrix.

    Five Newton-Schulz steps on X = M / ‖M‖,

        A = X Xᵀ;  X ← a X + (b A + c A²) X,

    move the singular values close to 1, between 0.7 and 1.2 (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon).

    Args:
        matrix: (M, N), any floating dtype. The result is computed and returned in this dtype.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """The Muon optimizer.

    With gradient G, momentum μ, learning rate η and weight decay λ, for a weight W of shape (M, N):

        B ← μ B + G;  O = orthogonalised(G + μ B);  W ← W - η (λ W + 0.2 √max(M, N) O)

    With the factor 0.2 √max(M, N), the update has the size of AdamW's update, so that both optimizers can use
    the same η and λ (Liu et al. 2025, equation 4, https://arxiv.org/abs/2502.16982).

    If the rows of the matrices are sharded over the ranks, each rank receives some whole matrices,
    orthogonalizes them and sends the rows back. All other matrices are gathered by every rank. Newton-Schulz
    runs in bf16 on CUDA. On other devices it runs in fp32, or in the weight's dtype if that is wider.

    Args:
        groups: parameter groups with `params` (matrices) and `weight_decay`.
        lr: the learning rate η.
        momentum: the momentum μ.
        meter: the meter for the collectives.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float, meter: CollectiveMeter
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})
        self._meter = meter
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrices in _batches(group["params"]):
                updates = [self._momentum(matrix, group["momentum"]) for matrix in matrices]
                for matrix, update in zip(matrices, self._orthogonalised(matrices, updates), strict=True):
                    scale = 0.2 * math.sqrt(max(matrix.shape))
                    weight = local(matrix).mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update.to(weight.dtype), alpha=-group["lr"] * scale)

    def _momentum(self, matrix: Tensor, momentum: float) -> Tensor:
        """Update B, and return this rank's shard of G + μ B in the dtype for Newton-Schulz."""
        assert matrix.grad is not None
        gradient, buffer = local(matrix.grad), local(self.state[matrix]["momentum_buffer"])
        buffer.mul_(momentum).add_(gradient)
        update = gradient.add(buffer, alpha=momentum)
        wide = torch.promote_types(update.dtype, torch.float32)
        return update.to(torch.bfloat16 if update.device.type == "cuda" else wide)

    def _orthogonalised(self, matrices: Sequence[Tensor], updates: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield this rank's shard of each orthogonalized update."""
        mesh = _dealing_mesh(matrices[0])
        if mesh is not None:
            yield from self._exchanged(mesh, matrices, updates)
            return
        for matrix, update in zip(matrices, updates, strict=True):
            if isinstance(matrix, DTensor) and matrix.device_mesh.size() > 1:
                yield self._gathered(matrix, update)
            else:
                yield orthogonalised(update)

    def _exchanged(
        self, mesh: DeviceMesh, matrices: Sequence[Tensor], updates: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield this rank's shard of each update, after one rank has orthogonalized the whole update.

        Rank r receives the whole r-th matrix, and sends its rows back after the computation.
        """
        ranks, rank = mesh.size(), mesh.get_local_rank()

        def exchange(received: Tensor, sent: Tensor, taken: list[int], given: list[int]) -> None:
            from_others = (received.numel() - taken[rank]) * received.element_size()
            with self._meter.measure(received.device, from_others):
                dist.all_to_all_single(received, sent, taken, given, group=mesh.get_group())

        given = [update.numel() for update in updates] + [0] * (ranks - len(updates))
        taken = [0] * ranks
        if rank < len(matrices):
            height, width = matrices[rank].shape
            most = -(-height // ranks)  # FSDP's rows per rank, except the last ranks
            taken = [max(0, min(most, height - most * at)) * width for at in range(ranks)]
        sent = torch.cat([update.reshape(-1) for update in updates])
        whole = sent.new_empty(sum(taken))
        exchange(whole, sent, taken, given)
        if rank < len(matrices):
            whole = orthogonalised(whole.view(matrices[rank].shape)).reshape(-1)
        back = torch.empty_like(sent)
        exchange(back, whole, given, taken)
        for part, update in zip(torch.split(back, given), updates, strict=False):
            yield part.view(update.shape)

    def _gathered(self, matrix: DTensor, update: Tensor) -> Tensor:
        mesh, placements = matrix.device_mesh, matrix.placements
        part = DTensor.from_local(
            update, mesh, placements, run_check=False, shape=matrix.shape, stride=matrix.stride()
        )
        from_others = (matrix.numel() - update.numel()) * update.element_size()
        with self._meter.measure(update.device, from_others):
            whole = part.full_tensor()
        return local(distribute_tensor(orthogonalised(whole), mesh, placements, src_data_rank=None))


def _dealing_mesh(matrix: Tensor) -> DeviceMesh | None:
    """Return the mesh over which the matrix's rows are sharded.

    The result is None unless the mesh has one dimension and more than one rank.
    """
    if not isinstance(matrix, DTensor) or matrix.device_mesh.size() == 1:
        return None
    rows = matrix.device_mesh.ndim == 1 and matrix.placements == (Shard(0),)
    return matrix.device_mesh if rows else None


def _batches(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the matrices that have a gradient, in batches of one matrix per rank.

    All matrices of a batch are on the same mesh. They have similar sizes, so that no rank waits for a rank
    with a larger matrix.
    """
    meshes: dict[DeviceMesh | None, list[Tensor]] = {}
    for matrix in sorted(matrices, key=lambda matrix: -matrix.numel()):
        if matrix.grad is not None:
            meshes.setdefault(_dealing_mesh(matrix), []).append(matrix)
    for mesh, lot in meshes.items():
        size = 1 if mesh is None else mesh.size()
        yield from (lot[at : at + size] for at in range(0, len(lot), size))
