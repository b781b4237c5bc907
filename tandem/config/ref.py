"""`actor_rollout_ref.ref`: the reference policy of the KL terms."""

from __future__ import annotations

from tandem.config.batching import LogProbSection
from tandem.config.fsdp import RefFSDPConfig
from tandem.config.section import key


class RefConfig(LogProbSection):
    """The frozen policy; it exists when a KL term asks for it."""

    ulysses_sequence_parallel_size: int = key(
        1,
        "devices that share one sequence",
        read_by="workers.actor",
        inherits="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        ge=1,
    )
    reset_interval: int = key(
        0,
        "training steps after which the reference takes the actor's weights, again and again; 0: never. It "
        "belongs into checkpoints then",
        read_by="trainer.ppo",
        ge=0,
    )
    reset_optimizer: bool = key(
        False,
        "with each reset the actor's optimizer begins anew (ProRL, Liu et al. 2025, arXiv 2505.24864); the "
        "learning rate's schedule goes on",
        read_by="trainer.ppo",
    )
    fsdp_config: RefFSDPConfig = RefFSDPConfig()
