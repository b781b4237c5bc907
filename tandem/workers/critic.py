"""The worker for the critic, which is a training engine with a value head."""

from __future__ import annotations

from tandem.config.critic import CriticConfig
from tandem.engines.train.fsdp import FSDPEngine
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, register
from tandem.workers.base import EngineWorker, micro_batching, seeded
from tandem.workers.correction import KEPT, without_rejected
from tandem.workers.losses import CriticLoss
from tandem.workers.worst_batch import WorstBatch, run_worst_batch


class CriticWorker(EngineWorker):
    """The worker that estimates values and trains the critic.

    Args:
        config: The resolved critic section.
        norm_length: The divisor of "seq-mean-token-sum-norm", in tokens.
        total_steps: The number of training steps, for the learning rate schedule.
        updates_per_step: The number of optimizer steps per training step.
        seed: The seed of weights that are not in any file, such as adapters. The value head starts at zero.
        device: See `EngineWorker`.
        collective_timeout_s: See `EngineWorker`.
        run: See `EngineWorker`.
    """

    def __init__(
        self,
        config: CriticConfig,
        *,
        norm_length: float,
        total_steps: int,
        updates_per_step: int,
        seed: int,
        device: str,
        collective_timeout_s: float,
        run: RunFolder,
    ) -> None:
        super().__init__(run, "critic", device, collective_timeout_s)
        self.config = config
        self.loss = CriticLoss(config.cliprange_value, config.aggregation, norm_length)
        with seeded(seed):
            engine = FSDPEngine(
                config.model.path,
                kind="value",
                model=config.model,
                fsdp=config.fsdp_config,
                optim=config.optim,
                total_steps=total_steps,
                updates_per_step=updates_per_step,
                sequence_parallel=config.ulysses_sequence_parallel_size,
                device=self.device,
                say=self.say_for("critic"),
            )
        self.engine = self.hold("critic", engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def run_worst_batch(self, worst: WorstBatch) -> None:
        """Run the largest possible micro-batches; see `tandem.workers.worst_batch.run_worst_batch`."""
        run_worst_batch(self, "critic", self.loss.outputs, self.config.train_batching, worst)

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="critic", blocking=False, balance="tokens")
    def compute_values(self, batch: DataProto) -> DataProto:
        """Return `values`, ragged fp32 (fp64 for an fp64 model): the expected return before each token."""
        with self.working("values", self.engine):
            micro = micro_batching(self.config.forward_batching)
            return self.engine.forward(batch, outputs=frozenset({"values"}), micro=micro)

    @register(Dispatch.ND_COMPUTE_PROTO, mesh="critic", blocking=False, collect="first", balance="tokens")
    def update_critic(self, batch: DataProto) -> Metrics:
        """Take one optimizer step on a mini-batch with `values`, `returns` and `response_mask`.

        Tokens that the rollout correction rejected are left out.
        """
        with self.working("update_critic", self.engine, training=True):
            share = without_rejected(batch)
            return self.guarded_step("critic", share, self.loss, self.config, rejects=KEPT in batch)
