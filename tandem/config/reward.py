"""`custom_reward_function`: a reward function of the user's own."""

from __future__ import annotations

from typing import Any

from tandem.config.section import LocalPath, Section, key


class CustomRewardConfig(Section):
    """Replaces the built-in reward functions for every data source."""

    path: LocalPath | None = key(
        None,
        "Python file or module with it; null: built-in, by data source",
        read_by="rewards.custom",
    )
    name: str = key("compute_score", "the function's name", read_by="rewards.custom")
    reward_kwargs: dict[str, Any] = key({}, "further arguments of the function", read_by="rewards.custom")
