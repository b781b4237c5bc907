"""`actor_rollout_ref.ref`: the reference policy of the KL terms."""

from __future__ import annotations

from tandem.config.batching import LogProbSection
from tandem.config.fsdp import FSDPConfig


class RefConfig(LogProbSection):
    """The frozen policy; it exists when a KL term asks for it."""

    fsdp_config: FSDPConfig = FSDPConfig()
