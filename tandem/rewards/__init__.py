"""Rewards for responses: a built-in reward function per data source, and the user's own functions.

Importing this package registers the built-in reward functions.
"""

from tandem.rewards import arithmetic, dapo, generated, geometry3k, gsm8k, math, programs, rules, search_qa
from tandem.rewards.base import (
    Reward,
    Scorer,
    known_data_sources,
    register_reward,
    reward_for,
)
from tandem.rewards.custom import load_custom, own_reward
from tandem.rewards.items import Item, Scored
from tandem.rewards.pool import Pool, score
from tandem.rewards.programs import check_sources
from tandem.rewards.signatures import Reads

__all__ = [
    "Item",
    "Pool",
    "Reads",
    "Reward",
    "Scored",
    "Scorer",
    "arithmetic",
    "check_sources",
    "dapo",
    "generated",
    "geometry3k",
    "gsm8k",
    "known_data_sources",
    "load_custom",
    "math",
    "own_reward",
    "programs",
    "register_reward",
    "reward_for",
    "rules",
    "score",
    "search_qa",
]
