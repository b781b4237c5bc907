"""`custom_reward_function` and `reward_model`: a reward function of the user's own, and a trained model that
scores responses in place of functions."""

from __future__ import annotations

from typing import Any

from tandem.config.batching import Batching
from tandem.config.dynamic_sampling import OverlongBufferConfig
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import LOADING, BackboneConfig
from tandem.config.section import LocalPath, Section, key

WORKER = "workers.reward_model"


class CustomRewardConfig(Section):
    """Replaces the built-in reward functions for every data source."""

    path: LocalPath | None = key(
        None,
        "Python file or module with it; null: built-in, by data source",
        read_by="rewards.custom",
    )
    name: str = key("compute_score", "the function's name", read_by="rewards.custom")
    reward_kwargs: dict[str, Any] = key({}, "further arguments of the function", read_by="rewards.custom")


class RewardBackboneConfig(BackboneConfig):
    """The reward model's backbone and head; it reads the policy's tokens."""

    path: LocalPath = key(
        "",
        "Hugging Face folder of a sequence classifier with one label; needed with reward_model.enable",
        read_by=LOADING,
    )


class RewardModelConfig(Section):
    """The reward model; it only computes."""

    enable: bool = key(
        False, "score responses with this model, not with reward functions", read_by="trainer.assembly"
    )
    model: RewardBackboneConfig = RewardBackboneConfig()
    use_dynamic_bsz: bool = key(
        False,
        "cut micro-batches by tokens, not by samples",
        read_by=WORKER,
        inherits="critic.use_dynamic_bsz",
    )
    ulysses_sequence_parallel_size: int = key(1, "devices that share one sequence", read_by=WORKER, ge=1)
    forward_micro_batch_size_per_gpu: int | None = key(
        None, "samples per micro-batch and device; null: the whole share", read_by=WORKER, ge=1
    )
    forward_max_token_len_per_gpu: int = key(
        32768,
        "tokens per micro-batch and device, with use_dynamic_bsz",
        read_by=WORKER,
        inherits="critic.forward_max_token_len_per_gpu",
        ge=1,
    )
    fsdp_config: FSDPConfig = FSDPConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    @property
    def forward_batching(self) -> Batching:
        return Batching.of(
            dynamic=self.use_dynamic_bsz,
            samples=self.forward_micro_batch_size_per_gpu,
            tokens=self.forward_max_token_len_per_gpu,
        )
