"""The part of a worker for the reference policy of KL terms.

It computes log-probs and the inputs of an exact KL. When the reference is reset, it receives the actor's
weights.
"""

from __future__ import annotations

from torch import Tensor

from tandem.config.root import TrainConfig
from tandem.engines.train.base import REFERENCE, TrainEngine
from tandem.engines.weight_sync import Arrival, WeightBucket, check_copy
from tandem.models.routing import ROUTED
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, register
from tandem.workers.base import EngineWorker, micro_batching
from tandem.workers.parts import missing


class ReferencePart:
    """The part of a worker for the reference policy.

    Args:
        config: The resolved run config.
        engine: The reference's own engine, or the engine of an actor that trains adapters. The base model of
            such an actor is the reference.
        borrowed: Whether `engine` is the actor's engine.
        role: The name of the reference in `config.actor_rollout_ref.ref.references`.
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
    def _own_engine(self) -> TrainEngine:
        """The engine of the reference, if the reference has its own engine.

        Raises:
            EngineError: The engine is the actor's engine, whose weights must not be changed.
        """
        if self._borrowed:
            raise missing("ref, with weights of its own", "actor and ref over the same weights")
        return self.engine

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="ref", blocking=False, balance="tokens")
    def compute_ref_log_prob(self, worker: EngineWorker, batch: DataProto) -> DataProto:
        """Return the reference's log-probs `ref_log_probs`, ragged fp32 (fp64 for an fp64 model), in nats.

        With several references the column is `ref_log_probs.NAME`. If a KL term is exact, the result also has
        `ref_hidden`, ragged (T, D) in the compute dtype: for each token, the last hidden state that predicts
        the token. `ref_hidden` needs the memory of one hidden state per token.
        """
        micro = micro_batching(self._batching)
        batch = batch.select([name for name in batch.batch if name != ROUTED])  # it has its own routers
        with worker.working("ref", self.engine):
            out = self.engine.forward(batch, outputs=self._outputs, micro=micro, adapter=not self._borrowed)
        columns = {self._column: out.ragged("log_probs")}
        if "hidden" in out:
            columns[REFERENCE] = out.ragged("hidden")
        return DataProto(columns)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, collect="first")
    def reference_head(self, worker: EngineWorker) -> Tensor | None:
        """Return the reference's output embedding (V, D) on the host. Collective.

        All ranks except the first return None.
        """
        with worker.timeline.phase("weight_sync"), worker.on_device(self.engine):
            head = self.engine.output_head()
        return head.cpu() if worker.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_reference(self, worker: EngineWorker, bucket: WeightBucket) -> None:
        """Load a bucket of the actor's weights (see `export_weights`). Each rank copies only its shards.

        After the last bucket, the reference equals the current actor.

        Raises:
            EngineError: The weights belong to another model.
            WeightSyncError: A bucket is missing, or a weight differs from the sent weight.
        """
        engine = self._own_engine
        self._arrival.expect(bucket)
        with worker.timeline.phase("weight_sync"), worker.on_device(engine):
            engine.load_weights(bucket.tensors.items(), bucket.version, whole=False)
            if bucket.sent is not None:
                (dtype,) = {tensor.dtype for tensor in bucket.tensors.values()}
                check_copy(bucket.sent, engine.digest(dtype), holder="reference policy")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, collect="first")
    def reference_version(self, worker: EngineWorker) -> int:
        """Return the number of updates of the actor before its weights were copied to the reference."""
        return self._own_engine.version
