"""`critic`: the value function. Many defaults are the actor's values."""

from __future__ import annotations

from typing import Any

from tandem.config.actor import Aggregation, Strategy
from tandem.config.batching import BY_SAMPLES, BY_TOKENS, Batching
from tandem.config.fsdp import OPTIMIZER_HAS_STATE_HERE, FSDPConfig
from tandem.config.model import BackboneConfig, override_fields
from tandem.config.needs import ModelFolder, divides_batch, holds_longest
from tandem.config.optim import OptimConfig
from tandem.config.section import LocalPath, Section, key, section

ACTOR = "actor_rollout_ref.actor"


class CriticModelConfig(BackboneConfig):
    """The critic's backbone. Its value head always starts untrained.

    Attributes:
        path: Hugging Face folder of the critic's model.
        override_config: Fields of the model's config.json that this run changes. {}: none.
        resize_embeddings: Number of rows of the embedding. null: as many as the folder has.
    """

    path: LocalPath = key(..., inherits="actor_rollout_ref.model.path", needs=ModelFolder("config.json"))
    override_config: dict[str, Any] = key(
        {}, inherits="actor_rollout_ref.model.override_config", needs=override_fields
    )
    resize_embeddings: int | None = key(None, inherits="actor_rollout_ref.model.resize_embeddings", ge=1)


class CriticConfig(Section):
    """Batches, loss and optimizer of the value update.

    Attributes:
        strategy: Training engine. fsdp is another name for fsdp2.
        ppo_mini_batch_size: Prompts per optimizer step, over all devices.
        ppo_micro_batch_size_per_gpu: Samples per micro-batch and device. null: all samples of the mini-batch
            that are on the device.
        forward_micro_batch_size_per_gpu: Samples per micro-batch and device when values are computed without
            training. null: all samples that are on the device.
        use_dynamic_bsz: Limit micro-batches by their number of tokens instead of their number of samples.
        ppo_max_token_len_per_gpu: Tokens per micro-batch and device, with use_dynamic_bsz=true.
        forward_max_token_len_per_gpu: Tokens per micro-batch and device when values are computed without
            training, with use_dynamic_bsz=true.
        ppo_epochs: Number of passes over the samples of each step.
        shuffle: Shuffle the samples before each pass.
        cliprange_value: How far a new value may differ from the old value before its loss is clipped.
        loss_agg_mode: How the losses of all tokens are combined into one number, over the global mini-batch.
            null: token-mean.
        ulysses_sequence_parallel_size: Number of devices that share the computation of one sequence (Ulysses
            sequence parallelism).
    """

    model: CriticModelConfig
    strategy: Strategy = key("fsdp2", resumed="reported")
    ppo_mini_batch_size: int = key(1024, inherits=f"{ACTOR}.ppo_mini_batch_size", needs=divides_batch, ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(None, when=BY_SAMPLES, ge=1, resumed="reported")
    forward_micro_batch_size_per_gpu: int | None = key(
        inherits=".ppo_micro_batch_size_per_gpu", when=BY_SAMPLES, ge=1, resumed="reported"
    )
    use_dynamic_bsz: bool = key(False, inherits=f"{ACTOR}.use_dynamic_bsz", resumed="reported")
    ppo_max_token_len_per_gpu: int = key(32768, when=BY_TOKENS, needs=holds_longest, ge=1, resumed="reported")
    forward_max_token_len_per_gpu: int = key(
        inherits=".ppo_max_token_len_per_gpu", when=BY_TOKENS, needs=holds_longest, ge=1, resumed="reported"
    )
    ppo_epochs: int = key(1, inherits=f"{ACTOR}.ppo_epochs", ge=1)
    shuffle: bool = key(False, inherits=f"{ACTOR}.shuffle")
    cliprange_value: float = key(0.5, gt=0)
    loss_agg_mode: Aggregation = key(None, inherits=f"{ACTOR}.loss_agg_mode")
    ulysses_sequence_parallel_size: int = key(1, ge=1, resumed="reported")
    optim: OptimConfig = OptimConfig(lr=1e-5)
    fsdp_config: FSDPConfig = section(FSDPConfig(), below={"optimizer_offload": OPTIMIZER_HAS_STATE_HERE})

    @property
    def aggregation(self) -> str:
        """The name of the aggregation of token losses."""
        return self.loss_agg_mode or "token-mean"

    @property
    def train_batching(self) -> Batching:
        return Batching.of(
            self.use_dynamic_bsz, self.ppo_micro_batch_size_per_gpu, self.ppo_max_token_len_per_gpu
        )

    @property
    def forward_batching(self) -> Batching:
        return Batching.of(
            self.use_dynamic_bsz, self.forward_micro_batch_size_per_gpu, self.forward_max_token_len_per_gpu
        )
