"""Choose values that suit a run, for keys that the user did not set.

With verl's defaults (a batch of 1,024 prompts and one response per prompt), most first runs would stop before
they start.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.tables import needs

PROMPTS = 64
"""Prompts per step, if the data has that many."""
RESPONSES = 8
"""Responses per prompt, for an estimator that compares them."""
VALIDATIONS = 10
"""Validations per run, if the run has that many steps."""

_ACTOR = "actor_rollout_ref.actor"
_BATCHED_BY = (f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_micro_batch_size_per_gpu")


def fitted(config: TrainConfig, given: Collection[str], rows: int | None) -> dict[str, tuple[Any, str]]:
    """Return a dict from key to (value, reason), for keys that the user did not set.

    Args:
        config: the config, with all defaults filled in.
        given: the keys that the user set.
        rows: the number of rows in the training data; None: unknown.
    """
    data, policy, trainer = config.data, config.actor_rollout_ref, config.trainer
    found: dict[str, tuple[Any, str]] = {}
    compares = needs(config.algorithm.adv_estimator)
    if compares is not None and compares.group and not _any(given, "actor_rollout_ref.rollout.n"):
        why = f"{config.algorithm.adv_estimator} compares responses to one prompt"
        found["actor_rollout_ref.rollout.n"] = (RESPONSES, why)
    batch = data.train_batch_size
    if not _any(given, "data.train_batch_size", "data.gen_batch_size", f"{_ACTOR}.ppo_mini_batch_size"):
        batch = PROMPTS if rows is None else max(1, min(PROMPTS, rows))
        found["data.train_batch_size"] = (batch, f"{rows} rows" if batch == rows else "prompts per step")
    if not any(name in given for name in _BATCHED_BY):
        found[_BATCHED_BY[0]] = (True, "limits micro-batches by tokens")
        budget = f"{_ACTOR}.ppo_max_token_len_per_gpu"
        if budget not in given and policy.actor.ppo_max_token_len_per_gpu < data.longest:
            found[budget] = (data.longest, "the longest sequence")
    if data.val_files and "trainer.test_freq" not in given:
        steps = trainer.steps((rows or batch) // batch)
        freq = max(1, steps // VALIDATIONS)
        times = -(-steps // freq)  # including the one at the end
        found["trainer.test_freq"] = (freq, f"{times} validation{'s' if times > 1 else ''}")
    return found


def _any(given: Collection[str], *names: str) -> bool:
    """Return whether the user set one of these keys, or a key `NAME_…` that starts with one of them."""
    return any(key == name or key.startswith(f"{name}_") for key in given for name in names)
