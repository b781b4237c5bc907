"""The reference policy of the KL terms in a worker: its log-probs, what an exact KL needs of it, the actor's
weights that it takes when it is reset, and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import Tensor

from tandem.checkpoint.background import BackgroundWrite, written_mark
from tandem.config.root import TrainConfig
from tandem.engines.train.base import REFERENCE, TrainEngine
from tandem.engines.weight_sync import Arrival, WeightBucket, check_copy
from tandem.errors import EngineError
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, register
from tandem.workers.base import EngineWorker, micro_batching

PolicyPart = Literal["actor", "rollout", "ref"]


class ReferenceWorker(EngineWorker):
    """A worker that may hold the reference policy, alone or beside the actor.

    Args:
        config: the resolved run config.
        run, name: see `EngineWorker`.
        device: see `EngineWorker`.
        old_outputs: what the policy's forward before its updates gives besides log-probs.
    """

    def __init__(
        self, config: TrainConfig, run: RunFolder, name: str, device: str, old_outputs: frozenset[str]
    ) -> None:
        super().__init__(run, name, device, config.trainer.timeouts.collective)
        self._config = config
        policy = config.actor_rollout_ref
        self._batching = {"actor": policy.rollout.log_prob_batching, "ref": policy.ref.log_prob_batching}
        self._wanted: dict[str, frozenset[str]] = {
            "actor": old_outputs | {"log_probs"},
            "ref": frozenset({"log_probs", "hidden"} if config.exact_kl else {"log_probs"}),
        }
        self._reference_arrival = Arrival()
        self._reference_write = BackgroundWrite()

    def _engine(self, *roles: PolicyPart) -> TrainEngine:
        """The first of these that this worker holds."""
        for role in roles:
            if role in self.engines:
                return self.engines[role]
        raise EngineError(
            "this worker does not hold that part of the policy",
            got=f"the parts {', '.join(self.engines)}",
            expected=" or ".join(roles),
            remedy="call the method on the group whose workers were made with that part",
        )

    def _computed(self, role: PolicyPart, phase: str, batch: DataProto) -> DataProto:
        """What the run wants of a policy's forward. Where the actor trains adapters and no other engine is
        here, its base is the reference."""
        adapter = role in self.engines or "ref" not in self.meshes()
        engine = self._engine(role) if adapter else self._engine("actor")
        outputs, micro = self._wanted[role], micro_batching(self._batching[role])
        with self.timeline.phase(phase), self.on_device(engine):
            return engine.forward(batch, outputs=outputs, micro=micro, adapter=adapter)

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="ref", blocking=False, balance="tokens")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_probs`, ragged fp32 (fp64 for an fp64 model), nats. Where a KL term is exact, `ref_hidden`
        too, ragged (T, D) in the compute dtype: the last hidden states that predict each token, as many
        bytes per token as the model is wide."""
        out = self._computed("ref", "ref", batch)
        columns = {"ref_log_probs": out.ragged("log_probs")}
        if "hidden" in out:
            columns[REFERENCE] = out.ragged("hidden")
        return DataProto(columns)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, collect="first")
    def reference_head(self) -> Tensor | None:
        """(V, D): the reference's output embedding, on the host; None on all ranks but the first.
        Collective."""
        engine = self._engine("ref", "actor")
        with self.timeline.phase("weight_sync"), self.on_device(engine):
            head = engine.output_head()
        return head.cpu() if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold_reference_head(self, head: Tensor) -> None:
        """Keeps the reference's output embedding beside the actor, as many bytes on each rank as the actor's
        own in compute dtype, for the exact KL."""
        self._engine("actor").hold_reference_head(head)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_reference(self, bucket: WeightBucket) -> None:
        """Takes over a bucket of the actor's weights, each rank its shards; see `export_weights`. After the
        last the reference is the actor as it is now.

        Raises:
            EngineError: weights of another model.
            WeightSyncError: a bucket was left out, or a weight is not what was sent.
        """
        engine = self._engine("ref")
        self._reference_arrival.expect(bucket)
        with self.timeline.phase("weight_sync"), self.on_device(engine):
            engine.load_weights(bucket.tensors.items(), bucket.version, whole=False)
            if bucket.sent is not None:
                (dtype,) = {tensor.dtype for tensor in bucket.tensors.values()}
                check_copy(bucket.sent, engine.digest(dtype), holder="reference policy")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset_optimizer(self) -> None:
        """Lets the actor's optimizer begin anew."""
        actor = self._engine("actor")
        with self.on_device(actor, training=True):
            actor.reset_optimizer()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, collect="first")
    def reference_version(self) -> int:
        """Updates that the reference's weights had gone through as the actor's."""
        return self._engine("ref").version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_reference(self, path: Path) -> None:
        """Writes the reference's weights and version into the empty folder `path`."""
        self._engine("ref").save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_reference(self, path: Path) -> None:
        """Goes on with the reference that was saved."""
        self._engine("ref").load(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save_reference(self, path: Path) -> None:
        """See `begin_save`."""
        write = self._engine("ref").stage(path)
        self._reference_write.start(write, written_mark(path) if self.rank == 0 else None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_save_reference(self) -> None:
        """
        Raises:
            Exception: what a write begun by `begin_save_reference` met with.
        """
        self._reference_write.check()
