"""A reward's numbers by name as one column, for estimators that weigh them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tandem.errors import RewardError

_KEYS = "algorithm.gdpo_reward_keys"


def reward_components(extras: Sequence[Mapping[str, float]], keys: Sequence[str]) -> Tensor:
    """(B, K) fp64: the components of each sample's reward.

    Args:
        extras: (B) the finite numbers beside "score" that the reward returned for each sample, by name.
        keys: the components, in the order of the columns; none: all numbers, in the order of their names,
            which must then be the same for all samples.

    Raises:
        RewardError: a sample lacks a component, or has others than the first one; or there are none.
    """
    names = tuple(keys) or tuple(sorted(extras[0]))
    if not names:
        raise RewardError(
            "the advantage estimator weighs the components of the reward, and there are none",
            field="sample 0",
            got="a reward without numbers beside 'score'",
            expected="a dict such as {'score': 1.0, 'format': 1.0, 'accuracy': 0.0}",
            remedy="return one from the reward function; a reward model has no components",
        )
    for sample, extra in enumerate(extras):
        if not (set(names) <= set(extra) if keys else set(names) == set(extra)):
            raise RewardError(
                "the reward's components differ from sample to sample"
                if not keys
                else "the reward lacks a component",
                field=f"sample {sample}",
                got=", ".join(sorted(extra)) or "no numbers beside 'score'",
                expected=", ".join(names) + (f" ({_KEYS})" if keys else ", as in sample 0"),
                remedy=f"return the same numbers for every sample, or name in {_KEYS} those that all have",
            )
    return torch.tensor([[extra[name] for name in names] for extra in extras], dtype=torch.float64)
