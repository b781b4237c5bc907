"""Words of a config in short form, and tables of them with one row per line."""

import re
from collections.abc import Collection
from typing import Any

import pytest

SECTIONS = {
    "A": "actor_rollout_ref.actor", "R": "actor_rollout_ref.rollout", "M": "actor_rollout_ref.model",
    "REF": "actor_rollout_ref.ref", "V": "actor_rollout_ref.rollout.val_kwargs",
    "C": "algorithm.rollout_correction", "F": "algorithm.filter_groups",
    "P": "trainer.placement", "Q": "trainer.resource_pools", "W": "trainer.worker_classes",
    "T": "trainer", "D": "data", "G": "algorithm", "L": "actor_rollout_ref.actor.policy_loss",
    "FS": "actor_rollout_ref.actor.fsdp_config", "RM": "reward_model",
    "steps": "trainer.total_training_steps",
}  # fmt: skip
"""The beginning of a key in short, and in full."""
PHRASES = {
    "GRPO": "algorithm.adv_estimator=grpo R.n=4",
    "GAE": "algorithm.adv_estimator=gae",
    "SCORED": "reward_model.enable=true reward_model.model.path=${M.path}",
    "POOLS": "Q={a: [2], b: [1], c: [1]}",
    "APART": "P={actor_rollout: a, critic: b, reward: c}",
    "VAL": "data.val_files=${data.train_files}",
    "ADAPTIVE": "algorithm.use_kl_in_reward=true algorithm.kl_ctrl={type: adaptive, horizon: 100}",
}
"""A word in capital letters, and the words that it stands for."""


def full(text: str) -> str:
    """Return the text with the whole names of its keys."""
    text = re.sub(r"(?<!\S)[A-Z]{3,}(?!\S)", lambda found: PHRASES.get(found[0], found[0]), text)
    return re.sub(
        r"(?<![\w.:/'-])([A-Z]+|steps)(?=[.=])", lambda found: SECTIONS.get(found[0], found[0]), text
    )


def words(*texts: str) -> list[str]:
    """Return the words of texts such as `A.ppo_epochs=2 trainer.logger=[a, b]`."""
    parts = (re.split(r"\s+(?=[+~]*[\w./-]+=)", full(text.strip())) for text in texts)
    return [word for part in parts for word in part if word]


def rows(table: str, quick: Collection[str] | None = None) -> list[Any]:
    """Return the rows of a table for `parametrize`. Columns are divided by |; an indented line goes on.

    With `quick`, rows whose first cell is not in it are marked slow.
    """
    lines = re.sub(r"\n +", " ", table.strip()).split("\n")
    cells = [[cell.strip() for cell in f"{line} ".split(" | ")] for line in lines]
    width = max(map(len, cells))
    marks = [pytest.mark.slow if quick is not None and row[0] not in quick else () for row in cells]
    return [
        pytest.param(*row, *[""] * (width - len(row)), id=row[0], marks=mark)
        for row, mark in zip(cells, marks, strict=True)
    ]
