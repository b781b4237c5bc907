"""The policy that learns in a worker: its log-probs, its updates, and its weights on their way to others."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from tandem.config.root import TrainConfig
from tandem.engines.train.base import TrainEngine
from tandem.engines.weight_sync import Digest, Sent, WeightBucket, buckets
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
    """The policy that learns.

    Args:
        config: the resolved run config.
        engine: trains it.
        recompute_old: whether updates read an `old_log_probs` column.
        old_outputs: what `compute_log_prob` gives besides, of "sum_pi_squared", "ref_kl" and "entropy".
    """

    def __init__(
        self, config: TrainConfig, engine: TrainEngine, *, recompute_old: bool, old_outputs: frozenset[str]
    ) -> None:
        self.engine = engine
        self._actor = config.actor_rollout_ref.actor
        self._rollout = config.actor_rollout_ref.rollout
        self._adapters = config.actor_rollout_ref.model.lora_rank > 0
        self._outputs = old_outputs | {"log_probs"}
        correction = config.algorithm.rollout_correction
        self._bypasses = correction.bypass_mode
        self.loss = ActorLoss.from_config(
            self._actor,
            recomputed=recompute_old,
            correction=correction,
            references=config.actor_rollout_ref.ref.columns,
        )
        self._export = ExitStack()  # what is held between the first bucket and the last

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="actor", blocking=False, balance="tokens")
    def compute_log_prob(self, worker: EngineWorker, batch: DataProto) -> DataProto:
        """`old_log_probs`, ragged fp32 (fp64 for an fp64 model), nats; also measures how far the rollout's
        own are from them. With it what `old_outputs` names: `sum_pi_squared`, `entropy`, nats, and `ref_kl`,
        nats, for which the batch needs `ref_hidden`."""
        micro = micro_batching(self._rollout.log_prob_batching)
        with worker.working("old_log_prob", self.engine):
            computed = self.engine.forward(batch, outputs=self._outputs, micro=micro)
        out = computed.ragged("log_probs")
        columns = {name: batch.ragged(name).values for name in gap_columns(batch)}
        if columns and len(out.values) and self.engine.share.leads:
            add_rollout_gap(worker.observed, out.values, columns, batch.ragged("response_mask").values)
            self._add_evidence(worker, batch)
        others = {name: column for name, column in computed.batch.items() if name != "log_probs"}
        return DataProto({"old_log_probs": out, **others})

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="actor", collect="first")
    def explain_gap(self, worker: EngineWorker, batch: DataProto) -> None:
        """Measures under which fault the difference from the rollout would vanish; see `add_experiments`.

        Args:
            batch: a few samples that the weights wrote as they are now.
        """
        with worker.timeline.phase("explain_gap"), worker.on_device(self.engine):
            measured = Metrics()
            add_experiments(
                measured, self.engine, batch, adapters=self._adapters, temperature=self._rollout.temperature
            )
        if self.engine.share.leads:
            worker.observed = Metrics.merged([worker.observed, measured])

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
        """Takes one optimizer step on a mini-batch. Where its log-probs are the first under the policy that
        sampled, it also measures how far the rollout's own are from them.

        Args:
            first: whether no update on the same batch came before.
            entropy_coeff: of the entropy bonus; None: the config's.
        """
        loss = self.loss if entropy_coeff is None else self.loss.with_entropy_coeff(entropy_coeff)
        if not loss.recomputed or (first and self._bypasses):
            loss = replace(loss, compared=gap_columns(batch))
        if loss.compared and len(batch) and self.engine.share.leads:
            self._add_evidence(worker, batch)
        with worker.working("update_actor", self.engine, training=True):
            rejects = KEPT in batch or loss.rejects
            return self.step_on(worker, without_rejected(batch), loss, rejects=rejects)

    def step_on(self, worker: EngineWorker, batch: DataProto, loss: ActorLoss, *, rejects: bool) -> Metrics:
        """The optimizer step of an update, on what the loss keeps of its batch.

        Args:
            rejects: whether some of it may be left out.
        """
        return worker.guarded_step("actor", batch, loss, self._actor, rejects=rejects)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def run_worst_batch(self, worker: EngineWorker, worst: WorstBatch) -> None:
        """See `tandem.workers.worst_batch.run_worst_batch`."""
        run_worst_batch(worker, "actor", self.loss.outputs, self._actor.train_batching, worst)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold_reference_head(self, worker: EngineWorker, head: Tensor) -> None:
        """Keeps the reference's output embedding (V, D) beside the actor, as many bytes on each rank as the
        actor's own in compute dtype, for the exact KL."""
        self.engine.hold_reference_head(head)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset_optimizer(self, worker: EngineWorker) -> None:
        """Lets the actor's optimizer begin anew."""
        with worker.on_device(self.engine, training=True):
            self.engine.reset_optimizer()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, collect="first")
    def weight_buckets(self, worker: EngineWorker) -> int:
        """The number of buckets that `export_weights` packs the weights in."""
        return len(self._buckets())

    def _buckets(self) -> list[tuple[str, ...]]:
        size = self.engine.compute_dtype.itemsize
        sizes = {name: shape.numel() * size for name, shape in self.engine.weight_shapes.items()}
        return buckets(sizes, self._rollout.update_weights_bucket_megabytes * 2**20)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, collect="first")
    def export_weights(self, worker: EngineWorker, number: int) -> WeightBucket | None:
        """A bucket of the actor's weights in compute dtype, to be asked for in order from 0; None on all
        ranks but the first. Collective."""
        packed, engine = self._buckets(), self.engine
        last = number == len(packed) - 1
        with worker.timeline.phase("weight_sync"):
            if number == 0:
                self._export.close()
                self._export.enter_context(worker.on_device(engine))
            tensors = {}
            for name, value in engine.weights(dtype=engine.compute_dtype, names=packed[number]):
                if worker.rank == 0:  # of one process it may be the actor's own
                    tensors[name] = value.to("cpu", copy=worker.world_size == 1)
            sent = Sent(engine.version, engine.digest()) if last else None
            if last:
                self._export.close()
        return WeightBucket(number, len(packed), engine.version, tensors, sent) if worker.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, collect="first")
    def weight_digest(self, worker: EngineWorker) -> Digest:
        """The digest of the policy that learns, in compute dtype."""
        return self.engine.digest()
