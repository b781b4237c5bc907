"""Scores for responses: a registry by data source, scorers, and a user's own function.

Importing this package registers the scorers."""

from tandem.rewards import arithmetic, dapo, generated, geometry3k, gsm8k, math, programs, search_qa
from tandem.rewards.base import (
    Item,
    Reward,
    Scored,
    Scorer,
    known_data_sources,
    refuse_data_sources,
    register_reward,
    reward_for,
    score,
)
from tandem.rewards.custom import load_custom
from tandem.rewards.signatures import Reads
from tandem.rewards.weighted import own_reward

__all__ = [
    "Item",
    "Reads",
    "Reward",
    "Scored",
    "Scorer",
    "arithmetic",
    "dapo",
    "generated",
    "geometry3k",
    "gsm8k",
    "known_data_sources",
    "load_custom",
    "math",
    "own_reward",
    "programs",
    "refuse_data_sources",
    "register_reward",
    "reward_for",
    "score",
    "search_qa",
]
