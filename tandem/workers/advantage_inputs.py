"""Functions that check the inputs of advantages and collect the components of rewards in one column.

The column of components is for advantage estimators that weight each component of a reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tandem.errors import NonFiniteError, RewardError
from tandem.protocol import DataProto, Ragged

_REWARDS = ("token_level_scores", "reward_baselines")

_REMEDIES = {
    **dict.fromkeys(_REWARDS, "let the reward return finite numbers"),
    "ref_log_probs": "check the weights of the reference policy",
    "values": "the critic has diverged: lower critic.optim.lr, or resume from an earlier checkpoint",
    "rollout_log_probs": "an engine that returns no log-probs has NaN here: set another "
    "actor_rollout_ref.rollout.name",
}
_DIVERGED = "the policy has diverged: lower its learning rate, or resume from an earlier checkpoint"


def refuse_non_finite(batch: DataProto, columns: Iterable[str]) -> None:
    """Check that there is no NaN and no infinity in these columns.

    Rewards are checked at all tokens. Other columns with one value per token are checked at response tokens
    only.

    Args:
        batch: A batch with `response_mask` (ragged).
        columns: The names of the columns. Columns that are missing or not floating-point are skipped.

    Raises:
        RewardError: A reward is not finite.
        NonFiniteError: A value of another column is not finite.
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
    """Return the components of each sample's reward, (B, K) fp64.

    Args:
        extras: (B) One dict per sample, from name to finite number, with everything that the reward returned
            except "score".
        keys: The names of the components, in the order of the columns. If empty, all numbers are used, sorted
            by name. Then all samples must have the same names.

    Raises:
        RewardError: A sample has no value for a component, a sample has other components than the first
            sample, or there are no components.
    """
    names = tuple(keys) or tuple(sorted(extras[0]))
    if not names:
        raise RewardError(
            "the advantage estimator needs components of the reward, but there are none",
            field="sample 0",
            got="a reward without numbers except 'score'",
            expected="a dict such as {'score': 1.0, 'format': 1.0, 'accuracy': 0.0}",
            remedy="return such a dict from the reward function, or set reward models in reward_model.models",
        )
    for sample, extra in enumerate(extras):
        if not (set(names) <= set(extra) if keys else set(names) == set(extra)):
            raise RewardError(
                "the reward's components differ from sample to sample"
                if not keys
                else "the reward lacks a component",
                field=f"sample {sample}",
                got=", ".join(sorted(extra)) or "no numbers except 'score'",
                expected=", ".join(names) + (f" ({_KEYS})" if keys else ", as in sample 0"),
                remedy=f"return the same numbers for every sample, or list in {_KEYS} those that all have",
            )
    return torch.tensor([[extra[name] for name in names] for extra in extras], dtype=torch.float64)
