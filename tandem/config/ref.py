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
    fsdp_config: RefFSDPConfig = RefFSDPConfig()
