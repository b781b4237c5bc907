"""An AdamW optimizer that keeps its state in host memory and runs on the host's processor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tandem.models.tensor_group import local


def adamw_state(parameter: Tensor, *, device: torch.device | str, counter: torch.device | str) -> Any:
    """Create the optimizer state of one parameter before the first step.

    Args:
        parameter: the parameter to which the state belongs.
        device: device of the moments.
        counter: device of the step counter.
    """
    return {
        "step": torch.zeros((), dtype=torch.float32, device=counter),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False).to(device),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False).to(device),
    }


class HostAdamW(torch.optim.Optimizer):
    """AdamW that runs on the host's processor, as in ZeRO-Offload.

    AdamW: Loshchilov and Hutter 2019. ZeRO-Offload: Ren et al. 2021, https://arxiv.org/abs/2101.06840.

    The moments are never on the device. For each update, a shard and its gradient are copied to the host
    through pinned memory, which has the size of the largest shard. The new shard is copied back. In fp32,
    these copies are 12 bytes per parameter and step. Parameters on the host are updated in place.

    Args:
        groups: parameter groups with `params` and `weight_decay`.
        fused: True: use one fused kernel. False: use several kernels.
        numbers: lr, betas and eps.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, fused: bool, **numbers: Any) -> None:
        super().__init__(groups, numbers)
        self._fused = fused
        self._pinned: dict[str, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = adamw_state(parameter, device="cpu", counter="cpu")

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(local(parameter), local(parameter.grad), self.state[parameter], group)

    def _update(
        self, shard: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        weight, on_device = shard, shard.device.type != "cpu"
        if on_device:
            weight, gradient = self._fetched("weight", shard), self._fetched("gradient", gradient)
            torch.cuda.current_stream().synchronize()
        moments = [local(state["exp_avg"])], [local(state["exp_avg_sq"])]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        options |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        options |= {"foreach": not self._fused, "fused": self._fused, "amsgrad": False, "maximize": False}
        adamw([weight], [gradient], *moments, [], [state["step"]], **options)
        if on_device:  # the same stream, so the next fetch overwrites this memory only after this copy
            shard.copy_(weight, non_blocking=True)

    def _fetched(self, name: str, shard: Tensor) -> Tensor:
        """Copy the shard into pinned host memory and return it.

        The copy is asynchronous. Synchronize the stream before you read the result.
        """
        pinned = self._pinned.get(name)
        if pinned is None:
            sizes = [local(p).numel() for group in self.param_groups for p in group["params"]]
            pinned = self._pinned[name] = torch.empty(max(sizes), dtype=shard.dtype, pin_memory=True)
        return pinned[: shard.numel()].view(shard.shape).copy_(shard, non_blocking=True)
