"""The training of a mixture's routers: losses that balance the experts, biases, and metrics.

Shapes: N tokens of a micro-batch; B sequences; L layers with a mixture; E experts; K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.config.mixture import MixtureConfig
from tandem.engines.train.microbatch import MicroBatch
from tandem.errors import ConfigError
from tandem.models.collectives import CollectiveMeter
from tandem.models.lora import adapted_layers
from tandem.models.packing import PackedInputs
from tandem.models.parallel import Grid
from tandem.models.policy import PackedModel
from tandem.models.routing import Routing
from tandem.models.tensor_group import local, place
from tandem.observability.metrics import Metrics

# The experts whose load is reported one by one; with more, only summaries are reported.
_NAMED = 32
_LOSSES = ("router_aux_loss_coef", "router_z_loss_coef")


class Routers:
    """The routers of a training engine's model.

    Args:
        module: the model, before it is sharded.
        config: the config section.
        grid: the device meshes of the engine.
        meter: the meter for the collectives.

    Raises:
        ConfigError: a key is set that this model or this division of the model cannot have.
    """

    def __init__(
        self, module: PackedModel, config: MixtureConfig, grid: Grid, meter: CollectiveMeter
    ) -> None:
        self.mixtures, self._config, self._meter = module.mixtures, config, meter
        self._groups = [grid.work[name].get_group() for name in ("data", "sequence")]
        self._losses = config.router_aux_loss_coef > 0 or config.router_z_loss_coef > 0
        self._check(grid, adapted=bool(adapted_layers(module)))
        for router in self.mixtures.routers if config.freeze_router else ():
            router.requires_grad_(False)
        for owner, name in self.mixtures.biases:
            getattr(owner, name).requires_grad_(False)  # its update needs no gradient
        self._whole, self._tokens, self._sequences = module.whole_sequences, 1, 1
        self._sums, self._replays = torch.empty(0), False

    def _check(self, grid: Grid, *, adapted: bool) -> None:
        config, mixtures = self._config, self.mixtures
        asked = config.model_fields_set & {name for name, value in config if value}
        for name in sorted(asked):
            if not mixtures.layers:
                reason, expected = "the model has no mixture of experts", "a model with experts"
            elif name == "router_bias_update_rate" and len(mixtures.biases) < mixtures.layers:
                reason, expected = (
                    "the model's routers have no bias",
                    "an e_score_correction_bias",
                )
            elif name == "router_bias_update_rate" and adapted:
                reason, expected = "adapters leave all other weights as they are", "lora_rank=0"
            elif name in _LOSSES and grid.work["pp"].size() > 1:
                reason, expected = "pipeline stages do not compute router losses", "pipeline_parallel_size=1"
            elif name == "router_aux_loss_coef" and grid.work["sequence"].size() > 1:
                reason, expected = "the loss needs whole sequences", "ulysses_sequence_parallel_size=1"
            else:
                continue
            raise ConfigError(
                f"this key cannot be used here: {reason}",
                field=f"model.mixture.{name}",
                got=getattr(config, name),
                expected=expected,
                remedy=f"remove {name}",
            )

    def begin(self, parts: Sequence[MicroBatch]) -> None:
        """Start a mini-batch. Collective if there are router losses.

        Args:
            parts: this rank's micro-batches.
        """
        self._sums = torch.empty(0)
        self._replays = any(part.inputs.routing is not None for part in parts)
        if self._losses:
            sequences = sum(len(part.offsets) - 1 for part in parts if part.rows)
            tokens = sum(int(part.lengths.sum()) for part in parts if part.rows)
            both = torch.tensor([tokens if self._whole else tokens - sequences, sequences])
            self._meter.all_reduce(both, group=self._groups[0])
            self._tokens, self._sequences = both.clamp(min=1).tolist()

    def observed(self, part: MicroBatch) -> PackedInputs:
        """Return a micro-batch's inputs, with mixtures that are observed if there are any."""
        if not self.mixtures.layers:
            return part.inputs
        routing = part.inputs.routing or Routing()
        routing.observe = self._observer(part, routing)
        return replace(part.inputs, routing=routing)

    def losses(self, inputs: PackedInputs, metrics: Metrics) -> Tensor | float:
        """Return the router losses of a micro-batch after its forward pass, a scalar with gradients."""
        if not self._losses or inputs.routing is None:
            return 0.0
        total = torch.stack(list(inputs.routing.observed.values())).sum()
        metrics.add_sum("router/loss", total)
        return total

    def _observer(self, part: MicroBatch, routing: Routing) -> Callable[[int, Tensor, Tensor], Tensor]:
        origins_N, count = part.inputs.origins, len(part.offsets) - 1
        assert origins_N is not None
        real_N = (origins_N >= 0) & bool(part.rows)
        rows_N = torch.searchsorted(part.offsets, origins_N, right=True).sub(1).clamp(min=0)

        def observe(layer: int, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
            if not self._losses:
                logits_NE = logits_NE.detach()  # only for the metrics
            scores_NE = logits_NE.sigmoid() if routing.sigmoid else logits_NE.softmax(1)
            scores_NE = scores_NE / scores_NE.sum(1, keepdim=True)
            real_N1 = real_N.to(scores_NE.dtype).unsqueeze(1)
            uses_NE = torch.zeros_like(logits_NE).scatter(1, chosen_NK, 1.0) * real_N1
            if layer not in routing.observed:
                self._count(layer, scores_NE.detach() * real_N1, uses_NE)
                if layer in routing.missed:
                    self._sums[layer, -1] += (routing.missed[layer] * real_N).sum()
            if not self._losses:
                return logits_NE.new_zeros(())
            # Megatron-LM and DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20) sum this over layers.
            uses_BE, scores_BE = (
                uses_NE.new_zeros(count, uses_NE.shape[1]).index_add(0, rows_N, values_NE)
                for values_NE in (uses_NE, scores_NE * real_N1)
            )
            lengths_B = uses_BE.new_zeros(count).index_add(0, rows_N, real_N1[:, 0]).clamp(min=1)
            balance = ((uses_BE * scores_BE).sum(1) / lengths_B**2).sum() * self.mixtures.experts
            size = (logits_NE.logsumexp(1).square() * real_N1[:, 0]).sum()
            aux = balance / (self.mixtures.each * self._sequences)
            config = self._config
            return config.router_aux_loss_coef * aux + config.router_z_loss_coef * size / self._tokens

        return observe

    def _count(self, layer: int, scores_NE: Tensor, uses_NE: Tensor) -> None:
        """Add a micro-batch's loads and entropies to the sums of the mini-batch."""
        entropy = -torch.special.xlogy(scores_NE, scores_NE).sum()
        row = F.pad(torch.cat([uses_NE.sum(0), entropy.view(1)]), (0, 1)).double()
        if not self._sums.numel():
            self._sums = row.new_zeros(self.mixtures.layers, len(row))
        self._sums[layer] += row

    def finish(self, metrics: Metrics, *, update: bool) -> None:
        """Add the metrics of the mini-batch, the same on every rank, and move the biases. Collective.

        Args:
            metrics: the metrics, over all ranks.
            update: whether the weights were updated, so that the biases move too.
        """
        if not self._sums.numel():
            return
        for group in self._groups:
            self._meter.all_reduce(self._sums, group=group)
        loads_LE, entropies_L, missed_L = self._sums[:, :-2], self._sums[:, -2], self._sums[:, -1]
        shares_LE = loads_LE / loads_LE.mean(1, keepdim=True).clamp(min=1)
        tokens_L = loads_LE.sum(1) / self.mixtures.each
        metrics.add_mean("router/entropy", entropies_L.sum(), tokens_L.sum())
        if self._replays:
            metrics.add_mean("router/differs", missed_L.sum(), loads_LE.sum())
        metrics.add_mean("router/load_max", shares_LE.amax(1).mean(), 1.0)
        metrics.add_mean("router/load_min", shares_LE.amin(1).mean(), 1.0)
        metrics.add_mean("router/idle_experts", (loads_LE == 0).double().mean(), 1.0)
        if self.mixtures.experts <= _NAMED:
            for expert, share in enumerate(shares_LE.mean(0)):
                metrics.add_mean(f"router/load/expert_{expert}", share, 1.0)
        if update and self._config.router_bias_update_rate:
            self._move(loads_LE)

    def _move(self, loads_LE: Tensor) -> None:
        """Move the biases towards balanced loads (Wang et al. 2024, arXiv 2408.15664, algorithm 1)."""
        moves_LE = self._config.router_bias_update_rate * (loads_LE.mean(1, keepdim=True) - loads_LE).sign()
        for (owner, name), move_E in zip(self.mixtures.biases, moves_LE, strict=True):
            bias = getattr(owner, name).detach()
            local(bias).add_(move_E.view(bias.shape)[place(bias)])
