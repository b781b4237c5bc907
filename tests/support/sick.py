"""A healthy reward, and rewards and an estimator with the faults that learning warnings name."""

import zlib
from pathlib import Path

import torch


def digits(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of digits among the first two characters, a task that tiny models learn."""
    return sum(character.isdigit() for character in solution_str[:2]) / 2


def nothing(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0


def by_prompt(data_source, solution_str, ground_truth, extra_info=None):
    return float(int(ground_truth) % 2)


def by_lot(data_source, solution_str, ground_truth, extra_info=None):
    """Return a random score that is fixed for each response to each sum, which no policy can learn."""
    return float(zlib.crc32(f"{ground_truth} {solution_str}".encode()) % 2)


def dies(data_source, solution_str, ground_truth, extra_info=None, *, count, after):
    """Return random scores, and 0 after `after` responses of all processes, which `count` counts in bytes."""
    with Path(count).open("ab") as file:
        file.write(b".")
        return by_lot(data_source, solution_str, ground_truth) if file.tell() <= after else 0.0


def letter_and_parity(data_source, solution_str, ground_truth, extra_info=None):
    """Return half for a response that starts with a, and half for an odd sum: no policy gets both."""
    return (float(solution_str[:1] == "a") + int(ground_truth) % 2) / 2


def no_advantage(token_level_rewards, response_mask, offsets):
    return torch.zeros_like(token_level_rewards), token_level_rewards
