"""The config of `tandem rm`."""

from __future__ import annotations

from tandem.config.section import key
from tandem.config.supervised import SupervisedConfig, SupervisedDataConfig

DATA = "data.preferences"


class RMDataConfig(SupervisedDataConfig):
    """Preferences to learn a reward from."""

    chosen_key: str = key(
        "chosen", "column of the better answer: a conversation, or text that follows the prompt", read_by=DATA
    )
    rejected_key: str = key("rejected", "column of the worse answer, in the same form", read_by=DATA)
    margin_key: str | None = key(
        None, "column of numbers by which the better answer is to score higher; null: by any", read_by=DATA
    )


class RMConfig(SupervisedConfig):
    """The whole config of `tandem rm`."""

    data: RMDataConfig
    center_rewards_coefficient: float = key(
        0.0,
        "weight of (chosen reward + rejected reward) squared in the loss, which keeps rewards around zero",
        read_by="workers.losses",
        ge=0,
    )
