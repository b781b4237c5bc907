"""The training engine on FSDP2 (fully_shard), for one or many ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train.base import Counts, LossFn, MicroBatching, RecountingLoss
from tandem.engines.train.deterministic import repeatable
from tandem.engines.train.division import Division
from tandem.engines.train.execution import Execution, collected
from tandem.engines.train.gradients import check_finite, scale
from tandem.engines.train.microbatch import MicroBatch, global_counts, micro_batches
from tandem.engines.train.module import Kind, Settings, check_options, unsharded_module
from tandem.engines.train.optim import learning_rate
from tandem.engines.train.pipelined import Pipelined
from tandem.engines.train.recomputation import Recomputation
from tandem.engines.train.routers import Routers
from tandem.engines.train.stages import Stages
from tandem.engines.train.state import TrainState
from tandem.engines.weight_sync import Digest
from tandem.errors import EngineError
from tandem.models.activations import Managed, Switch, manage_activations
from tandem.models.collectives import CollectiveMeter, all_reduce_bytes
from tandem.models.compiled import compile_model
from tandem.models.lora import draw_adapters
from tandem.models.packed_check import check_sequences
from tandem.models.packed_verdict import LIMITS, require_packed
from tandem.models.parallel import shard
from tandem.models.pipeline import present
from tandem.models.policy import varied
from tandem.models.wrap import wrapped
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged


class FSDPEngine:
    """A training engine for a policy, value or score model, sharded over all ranks with FSDP2.

    `TrainEngine` documents the methods.

    Args:
        model_path: Hugging Face folder of the model.
        kind: the type of model: "policy" (outputs log_probs, entropy), "value" (values) or "score" (scores).
        model: config section of the backbone.
        fsdp: config section of sharding, precision and offload.
        optim: config section of the optimizer. None: the model is frozen.
        total_steps: number of steps in the learning-rate schedule, unless `optim` sets it.
        updates_per_step: number of optimizer steps per step of the schedule.
        temperature: the divisor of the policy's logits.
        sequence_parallel: number of ranks that share the tokens of each micro-batch (Ulysses). These ranks
            process the same rows.
        device: device of the model.
        say: a function that receives messages for the user. None: there are no messages.

    Raises:
        ModelError: the folder cannot be used, or the model cannot be divided over the ranks.
        ConfigError: a parallel size does not divide the number of ranks or a dimension of the model, the
            optimizer needs a package that is not installed, or kernels cannot run here. In these cases no
            weight has been loaded.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        kind: Kind = "policy",
        model: BackboneConfig,
        fsdp: FSDPConfig,
        optim: OptimConfig | None,
        total_steps: int,
        updates_per_step: int = 1,
        temperature: float = 1.0,
        sequence_parallel: int = 1,
        device: torch.device,
        say: Callable[[str], None] | None = None,
    ) -> None:
        settings = Settings(model, fsdp, optim, device)
        check_options(settings)
        self.device, self.version = device, 0
        self.compute_dtype, self.output_dtype = settings.compute, settings.output
        self._settings, self._fsdp, self._optim = settings, fsdp, optim
        self._total_steps, self._updates_per_step = total_steps, updates_per_step
        self._interrupted = False
        self._meter = CollectiveMeter()
        division = Division.of(model_path, settings, sequence_parallel, self._meter)
        self.grid, self.share, self._division = division.grid, division.grid.share, division
        self.unshards = division.whole and not model.lora_rank
        self._data_group = self.grid.work["data"].get_group()  # the ranks with different rows
        self.module, files = unsharded_module(kind, model_path, settings, temperature=temperature)
        division.check_layout(self.module)
        self.kernels, self.mixtures = self.module.kernels, self.module.mixtures
        self._routers = Routers(self.module, model.mixture, self.grid, self._meter)
        units = wrapped(self.module, fsdp.wrap_policy)
        stages = None if division.pipeline is None else Stages(division.pipeline, self.module)
        division.divide(self.module)
        self._units, switch = self._sharded(units)
        if files is not None:
            files.fill(self.module, device)
        draw_adapters(self.module, model.lora_adapter_path)
        self._recomputation = Recomputation(switch, self.module, self._units, division, settings, say)
        each, root = self._recomputation.reduces_each, self._units[-1]
        if stages is None:
            offload = self.activation_offload
            self._execution = Execution(
                self.module, root, device, routers=self._routers, each=each, offload=offload
            )
        else:
            self._execution = Pipelined(self.module, root, settings, stages, routers=self._routers, each=each)
        self._warm_up(kind, model_path)
        self._state = TrainState(self.module, optim, self._meter, self.grid, stages)

    def _sharded(self, units: list[list[nn.Module]]) -> tuple[list[FSDPModule], Switch | None]:
        """Set up recomputation, offloading and compilation, then shard the module.

        Everything that changes how layers run must happen before the sharding.

        Returns:
            The FSDP units, with the root last, and the switch that sets which layers are recomputed.
        """
        settings, fsdp = self._settings, self._fsdp
        # With one rank, resharding would only free parameters that the rank must then copy again.
        self._reshard_after_forward = fsdp.reshard_after_forward and self.grid.weights["shard"].size() > 1
        if fsdp.use_torch_compile:
            compile_model(self.module)
        trains = self._optim is not None
        layers = self.module.layers
        managed = manage_activations(layers, settings.model, self.device) if trains else Managed()
        self.activation_offload = managed.offload
        sharded = shard(
            self.module,
            present(units, self.module),
            self.grid.fsdp,
            experts=self._division.experts,
            compute_dtype=settings.compute,
            master_dtype=settings.master,
            reshard_after_forward=self._reshard_after_forward,
            forward_prefetch=fsdp.forward_prefetch,
            meter=self._meter,
        )
        return sharded, managed.switch

    def _warm_up(self, kind: Kind, model_path: str | Path) -> None:
        """Run the first forward passes through the root module.

        FSDP treats the first module that runs as its root. Without these passes, this could be a layer that
        the rollout calls. For a policy, this method also checks that packed sequences get the same log-probs
        as single sequences.

        Raises:
            ModelError: packed sequences get different log-probs.
        """
        if kind != "policy":
            token = DataProto({"tokens": Ragged.from_list([[0]], dtype=torch.int64)})
            self.forward(token, outputs=frozenset(), micro=MicroBatching())
            return
        tokens = DataProto({"tokens": check_sequences(self.module.decoder.config.vocab_size)})
        together, alone = (
            self.forward(tokens, outputs=frozenset({"log_probs"}), micro=micro).ragged("log_probs").values
            for micro in (MicroBatching(), MicroBatching(max_samples=1))
        )
        require_packed(together, alone, LIMITS[self.compute_dtype], str(model_path))

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _micro_batches(
        self, batch: DataProto, columns: frozenset[str], micro: MicroBatching
    ) -> Iterator[MicroBatch]:
        return micro_batches(
            batch,
            columns,
            micro,
            module=self.module,
            split=self._division.sequence,
            stages=self.grid.work["pp"].size(),
            padded=not self._settings.model.use_remove_padding,
            meter=self._meter,
            device=self.device,
        )

    def forward(
        self,
        batch: DataProto,
        *,
        outputs: frozenset[str],
        micro: MicroBatching,
        adapter: bool = True,
        temperature: float | None = None,
    ) -> DataProto:
        """Run the model without gradients; see `TrainEngine.forward`.

        If the batch has a `response_mask`, outputs are computed only where the mask is true, and are zero
        elsewhere. The outputs are returned on the host.

        Raises:
            EngineError: this type of model does not have one of the outputs.
        """
        try:
            varies = varied(self.module, adapter=adapter, temperature=temperature)
            with torch.no_grad(), varies, repeatable(self._fsdp):
                runs = self._execution.outputs(self._micro_batches(batch, frozenset(), micro), outputs)
                return collected(runs, outputs, batch.ragged("tokens"))
        finally:
            self._reshard()

    def train_step(self, batch: DataProto, loss: LossFn, *, micro: MicroBatching) -> Metrics:
        """Take one optimizer step over a mini-batch; see `TrainEngine.train_step`.

        The metrics are the metrics of the loss, grad_norm (before clipping) and lr. With activation offload,
        the metrics of `ActivationOffload.report` over all ranks are added. If the loss leaves out every
        token, only the metrics of the loss are returned. Then no state has changed, including the version.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite. No state has changed.
            DataError: a column that the loss needs is missing.
            NoTokensError: the mini-batch has no response token. No state has changed.
            EngineError: the model is frozen, or an earlier step was interrupted by another error.
        """
        if self._optim is None:
            raise EngineError(
                "a frozen model cannot be trained", remedy="create the engine with an optimizer (`optim`)"
            )
        if self._interrupted:
            raise EngineError(
                "an earlier training step was interrupted and left part of its gradient behind",
                remedy="restart from a checkpoint; the weights are intact and can be saved",
            )
        counts = global_counts(batch, self._meter, self._data_group)
        lr = learning_rate(self._optim, self.version // self._updates_per_step, self._total_steps)
        micro_batches = list(self._micro_batches(batch, loss.columns, micro))
        with repeatable(self._fsdp):
            self._recomputation.fit(micro_batches, micro, self._try_forward)
        self._interrupted = True
        try:
            with repeatable(self._fsdp):
                metrics, total = self._accumulate(micro_batches, loss, counts)
                self._interrupted = False
                if isinstance(loss, RecountingLoss):
                    factor = loss.recount(metrics, counts)
                    if factor == 0:
                        self._routers.finish(metrics, update=False)
                        return metrics
                    scale(self.module.parameters(), factor)
                    total = total * factor
                grad_norm = self._state.gradient_norm()
                check_finite(total, grad_norm)
                self._state.step(lr, grad_norm, self._optim.clip_grad)
        finally:
            self.module.mixtures.routing = None
            self.module.zero_grad(set_to_none=True)
            self._reshard()
        self._routers.finish(metrics, update=True)
        self.version += 1
        metrics.add_mean("grad_norm", grad_norm, 1.0)
        metrics.add_max("lr", lr)
        return metrics

    def _try_forward(self, part: MicroBatch) -> None:
        """Run a micro-batch without gradients, and drop its outputs."""
        with torch.no_grad(), self._recomputation.out_of_memory():
            for _ in self._execution.outputs([part], frozenset()):
                pass
        self._reshard()

    def _accumulate(
        self, micro_batches: list[MicroBatch], loss: LossFn, counts: Counts
    ) -> tuple[Metrics, Tensor]:
        """Compute the gradients of the whole mini-batch, and return its metrics and loss over all ranks."""
        with self._recomputation.out_of_memory():
            merged, total = self._execution.gradients(micro_batches, loss, counts)
        self._meter.all_reduce(total, group=self._data_group)
        if self.share.size > 1:
            with self._meter.measure(self.device, all_reduce_bytes(merged.reduced_bytes, self.share.size)):
                merged = merged.all_reduced(self._data_group, self.device)
        return self._execution.broadcast(merged, total)

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        """Yield the whole module, in evaluation mode; see `TrainEngine.unsharded`.

        Raises:
            EngineError: the model is divided by tensor, expert or pipeline parallelism, or has adapters; see
                `unshards`.
        """
        self._division.check_whole()
        self._state.adapters.check_whole()
        training = self.module.training
        for unit in self._units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        self.module.eval()
        try:
            yield self.module.model
        finally:
            self.module.train(training)
            for unit in self._units[:-1]:
                unit.set_reshard_after_forward(self._reshard_after_forward, recurse=False)
            self._reshard()

    def weights(
        self, *, dtype: torch.dtype | None = None, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of each weight; see `TrainEngine.weights`.

        Adapters are merged into the shards, and the shards are converted to `dtype` before they are gathered.
        Only one gathered tensor exists at a time.
        """
        yield from self._state.weights(dtype or self._settings.master, names)

    @property
    def weight_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all weights; see `TrainEngine.weight_shapes`."""
        return self._state.shapes()

    def digest(self, dtype: torch.dtype | None = None) -> Digest:
        """Return the digest of the whole weights; see `TrainEngine.digest`."""
        sums = self._state.checksums(dtype or self.compute_dtype)
        total = torch.stack(list(sums.values()))
        for name in ("shard", "tp", "pp"):
            self._meter.all_reduce(total, group=self.grid.weights[name].get_group())
        return dict(zip(sums, total.tolist(), strict=True))

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int, *, whole: bool = True) -> None:
        """Load a stream of names and whole tensors; see `TrainEngine.load_weights`."""
        self._state.copy_in(stream, whole=whole)
        self.version = version

    def reset_optimizer(self) -> None:
        """Reset the optimizer's moments; see `TrainEngine.reset_optimizer`."""
        self._state.reset_optimizer()

    def output_head(self) -> Tensor:
        """Return the whole output embedding; see `TrainEngine.output_head`."""
        return self._state.output_head(self.compute_dtype)

    def hold_reference_head(self, head: Tensor) -> None:
        """Store the reference's output embedding; see `TrainEngine.hold_reference_head`."""
        self.module.reference_head = head.to(self.device, self.compute_dtype)

    def take_collectives(self) -> tuple[float, int]:
        """Return the seconds and bytes of collectives; see `TrainEngine.take_collectives`.

        The small collectives for the gradient norm and for checkpoints are not included.
        """
        return self._meter.take()

    def save(self, path: Path) -> None:
        """Save model, optimizer state and version into the folder `path`. Each rank writes its shards."""
        self._state.save(path, self.version)

    def stage(self, path: Path) -> Callable[[], None]:
        """Copy the state to the host and return a function that writes it; see `TrainEngine.stage`."""
        return self._state.stage(path, self.version)

    def load(self, path: Path) -> None:
        """Load a checkpoint that `save` wrote, from the same or a different number of ranks.

        Raises:
            CheckpointError: the checkpoint cannot be read, or belongs to another model.
        """
        self.version = self._state.load(path)

    def offload(self) -> None:
        """Move parameters and optimizer state to the host, as set in the config. On a CPU, do nothing."""
        if self.device.type != "cpu":
            self._state.offload(parameters=self._fsdp.param_offload, optimizer=self._fsdp.optimizer_offload)

    def onload(self, *, optimizer: bool) -> None:
        """Move offloaded state back to the device; see `TrainEngine.onload`."""
        optimizer = optimizer and self._fsdp.optimizer_offload
        self._state.onload(parameters=self._fsdp.param_offload, optimizer=optimizer)

    def take_transfers(self) -> dict[str, tuple[float, int]]:
        """Return the seconds and bytes of state copies; see `TrainEngine.take_transfers`."""
        return self._state.take_transfers()

    def state_info(self) -> dict[str, Any]:
        """Return parameter counts, dtypes, number of ranks, and this rank's bytes of state on each device."""
        return {
            **self._state.counts(),
            "master_dtype": str(self._settings.master),
            "compute_dtype": str(self.compute_dtype),
            "world_size": self.grid.work.size(),
            "device": str(self.device),
            "offload_applies": self.device.type != "cpu",
            **self._state.bytes_by_device(),
        }
