"""Expert parallelism: each rank of a group has some of the experts of each mixture.

The ranks of a group have different tokens (GShard, Lepikhin et al. 2020, arXiv 2006.16668). For each pair of
a token and an expert that its router chose, the token's rank sends the hidden state to the expert's rank and
gets the expert's output back. No pair is dropped.

Shapes: N tokens of this rank; K chosen experts per token; S = N K pairs of this rank; R ranks of the group;
E experts of this rank; T pairs of all ranks for the experts of this rank; D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tandem.config.model import EXPERT_COUNTS
from tandem.errors import ConfigError, ModelError
from tandem.models.collectives import CollectiveMeter, exchanged
from tandem.models.tensor_group import local, seen_as

FIELD = "fsdp_config.expert_parallel_size"


def check_expert_parallel(config: Any, size: int) -> None:
    """Check that the experts of a model can be divided over `size` ranks.

    Args:
        config: a transformers config of a language model.
        size: number of ranks that divide the experts.

    Raises:
        ModelError: If the model has no mixture of experts.
        ConfigError: If the experts cannot be divided evenly.
    """
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in EXPERT_COUNTS}
    found = {name: count for name, count in sizes.items() if isinstance(count, int)}
    if size > 1 and not found:
        raise _without_mixture(size, text.model_type)
    for name, count in found.items():
        if count % size:
            raise ConfigError(
                "the experts of this model cannot be divided evenly",
                field=FIELD,
                got=f"{size}, {name}={count}",
                expected=f"a divisor of {count}",
                remedy="divide the experts among fewer ranks; FSDP shards over all others",
            )


def _without_mixture(size: int, kind: str) -> ModelError:
    return ModelError(
        "expert parallelism needs a model with a mixture of experts that transformers computes as one module",
        field=FIELD,
        got=f"{size}, model_type {kind}",
        expected="1",
        remedy="set expert_parallel_size to 1; FSDP shards any model",
    )


class ExpertGroup:
    """A group of ranks that divides the experts of all mixtures of a model.

    Args:
        mesh: mesh ("pp", "replicate", "shard", "ep", "tp"). "ep" is the ranks of a group; "shard" is the
            ranks with the same experts in one copy of the weights.
        meter: the meter for exchanged bytes.

    Attributes:
        size: R.
        shards: number of ranks over which FSDP shards the experts of this rank.
        fsdp: the mesh for FSDP2's `fully_shard` of the experts.
    """

    def __init__(self, mesh: DeviceMesh, meter: CollectiveMeter) -> None:
        self.size = mesh["ep"].size()
        self.fsdp = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
        self._holders = mesh["ep", "tp"] if mesh["tp"].size() > 1 else mesh["ep"]
        self.shards = mesh["shard"].size()
        self._rank, self._group = mesh["ep"].get_local_rank(), mesh["ep"].get_group()
        self._meter = meter

    def check(self, model: Any) -> None:
        """Check that a policy, value or score model has experts that can be divided.

        Raises:
            ModelError: If it has none.
        """
        if not experts_modules(model):
            raise _without_mixture(self.size, model.decoder.config.model_type)

    def divide(self, model: nn.Module) -> None:
        """Divide the experts of a whole model, in place. The model must be the same on all ranks.

        Call this after tensor parallelism has split the model, and before FSDP shards it.
        """
        for module in experts_modules(model):
            self._divide(module)

    def _divide(self, module: Any) -> None:
        placements = (Shard(0), Replicate())[: self._holders.ndim]
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = local(parameter.detach())
            placed = distribute_tensor(whole, self._holders, placements, src_data_rank=None)
            learns = parameter.requires_grad
            module.register_parameter(name, nn.Parameter(placed, requires_grad=learns))
        module.num_experts //= self.size
        module.first_expert = self._rank * module.num_experts
        plain = module.forward

        def forward(hidden_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
            with seen_as(module, local):
                return self._computed(plain, module.num_experts, hidden_ND, chosen_NK, weights_NK)

        module.forward = forward

    def shard_dimension(self, parameter: nn.Parameter) -> Shard | None:
        """Return the dimension of the experts' weights that FSDP shards: the experts, or else the last.

        None means the experts, with shards of different sizes.
        """
        shape = local(parameter).shape
        return next((Shard(at) for at in (0, len(shape) - 1) if shape[at] % self.shards == 0), None)

    def _computed(
        self,
        experts: Callable[[Tensor, Tensor, Tensor], Tensor],
        count: int,
        hidden_ND: Tensor,
        chosen_NK: Tensor,
        weights_NK: Tensor,
    ) -> Tensor:
        """Return (N, D) the weighted sum of the outputs of each token's experts.

        Args:
            experts: the forward of this rank's experts, with the arguments of `sorted_experts`.
            count: E.
            hidden_ND: the hidden states of this rank's tokens.
            chosen_NK: int64, the numbers of the experts that compute each token, of all R E experts.
            weights_NK: the weight of each expert's output.
        """
        each = chosen_NK.shape[1]
        order_S = chosen_NK.flatten().argsort(stable=True)
        back_S = order_S.argsort()
        sent_RE = torch.bincount(chosen_NK.flatten(), minlength=self.size * count).view(self.size, count)
        received_RE = self._sent(sent_RE, [1] * self.size, [1] * self.size)
        there, here = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).tolist()
        local_T = torch.arange(count, device=order_S.device).repeat(self.size)
        local_T = local_T.repeat_interleave(received_RE.flatten(), output_size=sum(here))

        def away(x_SD: Tensor) -> Tensor:
            return self._sent(x_SD, there, here)

        def home(x_TD: Tensor) -> Tensor:
            return self._sent(x_TD, here, there).index_select(0, back_S)

        # The functions of each pair are linear, and each is the other's gradient.
        states_TD = exchanged(
            hidden_ND,
            lambda x_ND: away(x_ND.index_select(0, order_S // each)),
            lambda x_TD: home(x_TD).view(-1, each, x_TD.shape[1]).sum(1),
        )
        out_TD = _at_least_one(experts, states_TD, local_T.unsqueeze(1))
        out_SD = exchanged(out_TD, home, lambda x_SD: away(x_SD.index_select(0, order_S)))
        out_NKD = out_SD.view(-1, each, out_SD.shape[1]) * weights_NK.unsqueeze(-1)
        return out_NKD.sum(1).to(hidden_ND.dtype)

    def _sent(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send consecutive rows to the ranks of the group, in their order, and return the received rows."""
        found = rows.new_empty(sum(received), rows.shape[1])
        others = sum(received) - received[self._rank]
        with self._meter.measure(rows.device, others * rows.shape[1] * rows.element_size()):
            dist.all_to_all_single(found, rows.contiguous(), received, sent, group=self._group)
        return found


def _at_least_one(
    experts: Callable[[Tensor, Tensor, Tensor], Tensor], states_TD: Tensor, chosen_T1: Tensor
) -> Tensor:
    """Return the outputs of the experts; with no row, a row of zeros is computed and left out.

    Kernels for grouped products need not accept empty products.
    """
    rows = len(states_TD)
    if not rows:
        states_TD, chosen_T1 = F.pad(states_TD, (0, 0, 0, 1)), chosen_T1.new_zeros(1, 1)
    return experts(states_TD, chosen_T1, states_TD.new_ones(chosen_T1.shape))[:rows]


def experts_modules(model: nn.Module) -> list[Any]:
    """Return the modules with the experts' weights that transformers computes by a chosen function."""
    return [module for module in model.modules() if hasattr(module, "has_gate")]
