"""Rewards and an estimator with the faults that warnings about learning name, and a healthy reward."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of digits among the first two characters: a task that tiny models learn."""
    return sum(character.isdigit() for character in solution_str[:2]) / 2


def nothing(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The mistake of a parser that finds no answer anywhere."""
    return 0.0


def by_prompt(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Worth the same whatever is answered: 1 for every second sum, else 0."""
    return float(int(ground_truth) % 2)


def by_lot(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A lot that no policy can learn: the same for the same answer to the same sum."""
    return float(zlib.crc32(f"{ground_truth} {solution_str}".encode()) % 2)


def dies(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, *, count: str, after: int
) -> float:
    """Scores by lot, and after so many responses gives 0, as a judge that is out of reach.

    Args:
        count: a file that grows by a byte for each response, whichever process scores it.
    """
    with Path(count).open("ab") as file:
        file.write(b".")
        return by_lot(data_source, solution_str, ground_truth) if file.tell() <= after else 0.0


def letter_and_parity(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """Half for an answer that begins with a, half for a sum that is odd: no policy is right everywhere."""
    return (float(solution_str[:1] == "a") + int(ground_truth) % 2) / 2


def no_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Zero everywhere, as from a mask that is wrong."""
    return torch.zeros_like(token_level_rewards), token_level_rewards
