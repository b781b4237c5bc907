"""A user's estimators and reward that together need every column that the training loop can provide."""

from pathlib import Path

FILE = """
import torch
from tandem.algorithms.masked import segment_sum, spread

def against_greedy(token_level_rewards, response_mask, offsets, reward_baselines):
    better = segment_sum(token_level_rewards, offsets) - reward_baselines
    advantages = spread(better, response_mask, offsets)
    return advantages, advantages

def by_collisions(token_level_rewards, response_mask, offsets, sum_pi_squared):
    total = spread(segment_sum(token_level_rewards, offsets), response_mask, offsets)
    advantages = total * (1 - sum_pi_squared)
    return advantages, advantages

def in_turn(response_mask, offsets, reward_components):
    weights = 10.0 ** torch.arange(reward_components.shape[1], dtype=reward_components.dtype)
    advantages = spread(reward_components @ weights, response_mask, offsets)
    return advantages, advantages

def everything(
    token_level_rewards, response_mask, offsets, reward_baselines, sum_pi_squared, reward_components
):
    centred = segment_sum(token_level_rewards, offsets) - reward_baselines + reward_components.sum(1)
    advantages = spread(centred.to(token_level_rewards.dtype), response_mask, offsets) * (1 - sum_pi_squared)
    return advantages, advantages

def score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(set(solution_str)) / 6, "tens": len(solution_str) / 8, "digits": 0.5}

def score_unevenly(data_source, solution_str, ground_truth, extra_info=None):
    scored = {"score": 0.0, "tens": 1.0}
    if extra_info["index"] == 302:
        scored["digits"] = 1.0
    return scored
"""


def write(folder: Path) -> Path:
    path = folder / "loop_columns.py"
    path.write_text(FILE)
    return path
