"""The reference policy of the KL terms in a worker: its log-probs, what an exact KL needs of it, the actor's
weights that it takes when it is reset."""

from __future__ import annotations

from torch import Tensor

from tandem.config.root import TrainConfig
from tandem.engines.train.base import REFERENCE, TrainEngine
from tandem.engines.weight_sync import Arrival, WeightBucket, check_copy
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, register
from tandem.workers.base import EngineWorker, micro_batching
from tandem.workers.parts import missing


class ReferencePart:
    """The reference policy.

    Args:
        config: the resolved run config.
        engine: the reference's own, or an actor's that trains adapters and whose base is the reference.
        borrowed: whether the engine is the actor's.
        role: which of the references it is, of `config.actor_rollout_ref.ref.references`.
    """

    def __init__(
        self, config: TrainConfig, engine: TrainEngine, *, borrowed: bool, role: str = "ref"
    ) -> None:
        self.engine = engine
        self._borrowed = borrowed
        self._column = role.replace("ref", "ref_log_probs", 1)
        self._batching = config.actor_rollout_ref.ref.log_prob_batching
        self._outputs = frozenset({"log_probs", "hidden"} if config.exact_kl else {"log_probs"})
        self._arrival = Arrival()

    @property
    def _own(self) -> TrainEngine:
        """The engine, where it may get other weights.

        Raises:
            EngineError: it is the actor's.
        """
        if self._borrowed:
            raise missing("ref, with weights of its own", "actor and ref over the same weights")
        return self.engine

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="ref", blocking=False, balance="tokens")
    def compute_ref_log_prob(self, worker: EngineWorker, batch: DataProto) -> DataProto:
        """`ref_log_probs` (of one of several references `ref_log_probs.NAME`), ragged fp32 (fp64 for an fp64
        model), nats. Where a KL term is exact, `ref_hidden`
        too, ragged (T, D) in the compute dtype: the last hidden states that predict each token, as many
        bytes per token as the model is wide."""
        micro = micro_batching(self._batching)
        with worker.working("ref", self.engine):
            out = self.engine.forward(batch, outputs=self._outputs, micro=micro, adapter=not self._borrowed)
        columns = {self._column: out.ragged("log_probs")}
        if "hidden" in out:
            columns[REFERENCE] = out.ragged("hidden")
        return DataProto(columns)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, collect="first")
    def reference_head(self, worker: EngineWorker) -> Tensor | None:
        """(V, D): the reference's output embedding, on the host; None on all ranks but the first.
        Collective."""
        with worker.timeline.phase("weight_sync"), worker.on_device(self.engine):
            head = self.engine.output_head()
        return head.cpu() if worker.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_reference(self, worker: EngineWorker, bucket: WeightBucket) -> None:
        """Takes over a bucket of the actor's weights, each rank its shards; see `export_weights`. After the
        last the reference is the actor as it is now.

        Raises:
            EngineError: weights of another model.
            WeightSyncError: a bucket was left out, or a weight is not what was sent.
        """
        engine = self._own
        self._arrival.expect(bucket)
        with worker.timeline.phase("weight_sync"), worker.on_device(engine):
            engine.load_weights(bucket.tensors.items(), bucket.version, whole=False)
            if bucket.sent is not None:
                (dtype,) = {tensor.dtype for tensor in bucket.tensors.values()}
                check_copy(bucket.sent, engine.digest(dtype), holder="reference policy")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, collect="first")
    def reference_version(self, worker: EngineWorker) -> int:
        """The number of updates that the reference's weights had gone through as the actor's."""
        return self._own.version
