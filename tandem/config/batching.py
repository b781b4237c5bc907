"""The settings that split a device's part of a batch into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.needs import holds_longest
from tandem.config.section import Section, beside, key


@dataclass(frozen=True, slots=True)
class Batching:
    """A rule that splits sequences into micro-batches.

    At most one of the two limits is set. Without a limit, all sequences of a device are one micro-batch.

    Attributes:
        max_samples: sequences per micro-batch and device.
        max_tokens: tokens per micro-batch and device, for any number of sequences.
    """

    max_samples: int | None = None
    max_tokens: int | None = None

    @classmethod
    def of(cls, dynamic: bool, samples: int | None, tokens: int) -> Batching:
        """Return the rule for three config values: limit tokens if `dynamic`, otherwise samples."""
        return cls(max_tokens=tokens) if dynamic else cls(max_samples=samples)

    def __str__(self) -> str:
        if self.max_tokens is not None:
            return f"at most {self.max_tokens} tokens per device"
        if self.max_samples is not None:
            return f"at most {self.max_samples} samples per device"
        return "all samples at once"


BY_SAMPLES = beside("use_dynamic_bsz", False, notice=True)
BY_TOKENS = beside("use_dynamic_bsz", True, notice=True)
"""The conditions of the keys that limit micro-batches, in a section with the key use_dynamic_bsz."""


class LogProbSection(Section):
    """The micro-batch keys of a phase that only computes log-probs. The defaults are the actor's values.

    Attributes:
        log_prob_micro_batch_size_per_gpu: Samples per micro-batch and device when log-probs are computed.
            null: all samples at once.
        log_prob_use_dynamic_bsz: When log-probs are computed, limit micro-batches by their tokens instead of
            their samples.
        log_prob_max_token_len_per_gpu: Tokens per micro-batch and device when log-probs are computed with
            log_prob_use_dynamic_bsz=true.
    """

    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, when=beside("log_prob_use_dynamic_bsz", False, notice=True), ge=1, resumed="reported"
    )
    log_prob_use_dynamic_bsz: bool = key(
        False, inherits="actor_rollout_ref.actor.use_dynamic_bsz", resumed="reported"
    )
    log_prob_max_token_len_per_gpu: int = key(
        16384,
        inherits="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        when=beside("log_prob_use_dynamic_bsz", True, notice=True),
        needs=holds_longest,
        ge=1,
        resumed="reported",
    )

    @property
    def log_prob_batching(self) -> Batching:
        return Batching.of(
            self.log_prob_use_dynamic_bsz,
            self.log_prob_micro_batch_size_per_gpu,
            self.log_prob_max_token_len_per_gpu,
        )
