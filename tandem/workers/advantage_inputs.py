"""The inputs of advantages: the one check that they are finite, and a reward's numbers by name as one column,
for estimators that weigh them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tandem.errors import NonFiniteError, RewardError
from tandem.protocol import DataProto, Ragged

_REWARDS = ("token_level_scores", "reward_baselines")

_REMEDIES = {
    **dict.fromkeys(_REWARDS, "let the reward return finite numbers"),
    "ref_log_probs": "look at the weights of the reference policy",
    "values": "the critic has diverged: lower critic.optim.lr, or resume from an earlier checkpoint",
    "rollout_log_probs": "an engine that gives no log-probs has NaN here: choose another "
    "actor_rollout_ref.rollout.name",
}
_DIVERGED = "the policy has diverged: lower its learning rate, or resume from an earlier checkpoint"


def refuse_non_finite(batch: DataProto, columns: Iterable[str]) -> None:
    """Refuses NaN and infinity: in rewards everywhere, in other columns by token at response tokens.

    Args:
        batch: holds `response_mask` ragged.
        columns: the names to look at; those that the batch lacks or that hold no floating-point numbers are
            passed over.

    Raises:
        RewardError: a reward is not finite.
        NonFiniteError: another column is not.
    """
    mask = batch.ragged("response_mask")
    for name in sorted(set(columns) & set(batch.batch)):
        column = batch.batch[name]
        values = column.values if isinstance(column, Ragged) else column
        if not values.is_floating_point():
            continue
        bad = ~torch.isfinite(values)
        if isinstance(column, Ragged) and name not in _REWARDS:
            bad &= mask.values
        if not bool(bad.any()):
            continue
        first = int((mask.row_ids()[bad] if isinstance(column, Ragged) else bad.nonzero()[:, 0])[0])
        error, what = (RewardError, "rewards") if name in _REWARDS else (NonFiniteError, "numbers")
        raise error(
            f"{what} are not finite",
            field=name,
            got=f"{int(bad.sum())} NaN or infinite, the first in sample {first}",
            remedy=_REMEDIES.get(name, _DIVERGED),
        )


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
            remedy="return one from the reward function, or name reward models in reward_model.models",
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
