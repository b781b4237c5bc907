"""The part of a worker that trains the policy: log-probs, updates and export of weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from tandem.config.root import TrainConfig
from tandem.engines.train.base import TrainEngine
from tandem.engines.weight_sync import Digest, Sent, WeightBucket, buckets
from tandem.models.routing import MISSED, ROUTED
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, register
from tandem.watch.gap import add_evidence, add_rollout_gap, difference_limit, gap_columns
from tandem.workers.base import EngineWorker, micro_batching
from tandem.workers.correction import KEPT, without_rejected
from tandem.workers.experiments import add_experiments
from tandem.workers.losses import ActorLoss
from tandem.workers.worst_batch import WorstBatch, run_worst_batch


class ActorPart:
    """The part of a worker that trains the policy.

    Args:
        config: The resolved run config.
        engine: The training engine.
        recompute_old: Whether updates read an `old_log_probs` column.
        old_outputs: The further outputs of `compute_log_prob`, chosen from "sum_pi_squared", "ref_kl" and
            "entropy".
    """

    def __init__(
        self, config: TrainConfig, engine: TrainEngine, *, recompute_old: bool, old_outputs: frozenset[str]
    ) -> None:
        self.engine = engine
        self._actor = config.actor_rollout_ref.actor
        self._rollout = config.actor_rollout_ref.rollout
        self._adapters = config.actor_rollout_ref.model.lora_rank > 0
        self._replay = self._actor.router_replay.mode
        of_mode = {"R2": {ROUTED}, "R3": {MISSED}}.get(self._replay, set())
        self._outputs = old_outputs | {"log_probs"} | of_mode
        correction = config.algorithm.rollout_correction
        self._bypasses = correction.bypass_mode
        self.loss = ActorLoss.from_config(
            self._actor,
            recomputed=recompute_old,
            correction=correction,
            references=config.actor_rollout_ref.ref.columns,
        )
        self._export = ExitStack()  # keeps the weights on the device from the first bucket to the last

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="actor", blocking=False, balance="tokens")
    def compute_log_prob(self, worker: EngineWorker, batch: DataProto) -> DataProto:
        """Return the log-probs `old_log_probs`, ragged fp32 (fp64 for an fp64 model), in nats.

        The result also has the columns in `old_outputs`: `sum_pi_squared`, `entropy` in nats, and `ref_kl` in
        nats. For `ref_kl` the batch needs the column `ref_hidden`. With router_replay.mode=R2, the result
        also has the choice of experts, `routed_experts`. This method also measures the difference between the
        computed log-probs and the rollout engine's log-probs. With mode R3, it measures how many of the
        rollout's experts the routers would not choose here, `rollout/experts_differ`.
        """
        self._check_experts(batch)
        micro = micro_batching(self._rollout.log_prob_batching)
        with worker.working("old_log_prob", self.engine):
            computed = self.engine.forward(batch, outputs=self._outputs, micro=micro)
        out = computed.ragged("log_probs")
        columns = {name: batch.ragged(name).values for name in gap_columns(batch)}
        if columns and len(out.values) and self.engine.share.leads:
            add_rollout_gap(worker.observed, out.values, columns, batch.ragged("response_mask").values)
            self._add_evidence(worker, batch)
        if MISSED in computed and self.engine.share.leads:
            missed, mixtures = computed.ragged(MISSED), self.engine.mixtures
            inputs = len(missed.values) - len(missed)  # the last token of a sequence is no input
            chosen = float(inputs * mixtures.layers * mixtures.each)
            worker.observed.add_mean("rollout/experts_differ", float(missed.values.sum()), chosen)
        others = {n: column for n, column in computed.batch.items() if n not in ("log_probs", MISSED)}
        return DataProto({"old_log_probs": out, **others})

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="actor", collect="first")
    def explain_gap(self, worker: EngineWorker, batch: DataProto) -> None:
        """Measure which fault would explain different log-probs in rollout and training.

        See `tandem.workers.experiments.add_experiments`.

        Args:
            worker: The worker.
            batch: A few samples that were generated with the current weights.
        """
        with worker.timeline.phase("explain_gap"), worker.on_device(self.engine):
            measured = Metrics()
            add_experiments(
                measured, self.engine, batch, adapters=self._adapters, temperature=self._rollout.temperature
            )
        if self.engine.share.leads:
            worker.observed = Metrics.merged([worker.observed, measured])

    def _check_experts(self, batch: DataProto) -> None:
        if self._replay == "R3":
            batch.ragged(ROUTED)  # a DataError if the samples lack the rollout's experts

    def _add_evidence(self, worker: EngineWorker, batch: DataProto) -> None:
        rollout, engine = self._rollout, self.engine
        limit = difference_limit(rollout.log_prob_diff_limit, engine.compute_dtype, rollout.temperature)
        add_evidence(worker.observed, batch, engine.version, limit)

    @register(Dispatch.ND_COMPUTE_PROTO, mesh="actor", blocking=False, collect="first", balance="tokens")
    def update_actor(
        self,
        worker: EngineWorker,
        batch: DataProto,
        *,
        first: bool = False,
        entropy_coeff: float | None = None,
    ) -> Metrics:
        """Take one optimizer step on a mini-batch.

        This method also measures how much the rollout engine's log-probs differ from the update's log-probs,
        if the batch has no recomputed log-probs of the old policy.

        Args:
            worker: The worker.
            batch: The mini-batch.
            first: Whether this is the first update of the training step.
            entropy_coeff: The coefficient of the entropy bonus. None means the config's coefficient.
        """
        self._check_experts(batch)
        loss = self.loss if entropy_coeff is None else self.loss.with_entropy_coeff(entropy_coeff)
        if not loss.recomputed or (first and self._bypasses):
            loss = replace(loss, compared=gap_columns(batch))
        if loss.compared and len(batch) and self.engine.share.leads:
            self._add_evidence(worker, batch)
        with worker.working("update_actor", self.engine, training=True):
            rejects = KEPT in batch or loss.rejects
            return self.step_on(worker, without_rejected(batch), loss, rejects=rejects)

    def step_on(self, worker: EngineWorker, batch: DataProto, loss: ActorLoss, *, rejects: bool) -> Metrics:
        """Take the optimizer step of an update. Only the tokens that the loss keeps contribute.

        Args:
            worker: The worker.
            batch: The mini-batch.
            loss: The loss.
            rejects: Whether the loss may leave out tokens.
        """
        return worker.guarded_step("actor", batch, loss, self._actor, rejects=rejects)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def run_worst_batch(self, worker: EngineWorker, worst: WorstBatch) -> None:
        """Run the largest possible micro-batches; see `tandem.workers.worst_batch.run_worst_batch`."""
        run_worst_batch(worker, "actor", self.loss.outputs, self._actor.train_batching, worst)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold_reference_head(self, worker: EngineWorker, head: Tensor) -> None:
        """Keep the reference's output embedding (V, D) next to the actor, for the exact KL.

        On each rank this matrix needs as many bytes as the actor's output embedding in compute dtype.
        """
        self.engine.hold_reference_head(head)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset_optimizer(self, worker: EngineWorker) -> None:
        """Reset the state of the actor's optimizer."""
        with worker.on_device(self.engine, training=True):
            self.engine.reset_optimizer()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, collect="first")
    def weight_buckets(self, worker: EngineWorker) -> int:
        """Return the number of buckets into which `export_weights` packs the weights."""
        return len(self._buckets())

    def _buckets(self) -> list[tuple[str, ...]]:
        size = self.engine.compute_dtype.itemsize
        sizes = {name: shape.numel() * size for name, shape in self.engine.weight_shapes.items()}
        return buckets(sizes, self._rollout.update_weights_bucket_megabytes * 2**20)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, collect="first")
    def export_weights(self, worker: EngineWorker, number: int) -> WeightBucket | None:
        """Return one bucket of the actor's weights in compute dtype. Collective.

        Buckets must be requested in order from 0. All ranks except the first return None.
        """
        packed, engine = self._buckets(), self.engine
        last = number == len(packed) - 1
        with worker.timeline.phase("weight_sync"):
            if number == 0:
                self._export.close()
                self._export.enter_context(worker.on_device(engine))
            tensors = {}
            for name, value in engine.weights(dtype=engine.compute_dtype, names=packed[number]):
                if worker.rank == 0:  # in one process the tensor may be a parameter, so copy it
                    tensors[name] = value.to("cpu", copy=worker.world_size == 1)
            sent = Sent(engine.version, engine.digest()) if last else None
            if last:
                self._export.close()
        return WeightBucket(number, len(packed), engine.version, tensors, sent) if worker.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, collect="first")
    def weight_digest(self, worker: EngineWorker) -> Digest:
        """Return the digest of the trained policy in compute dtype."""
        return self.engine.digest()
