"""The one check of what advantages are computed from."""

from __future__ import annotations

from collections.abc import Iterable

import torch

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
        if bool(bad.any()):
            _refuse(
                name,
                bad,
                int((mask.row_ids()[bad] if isinstance(column, Ragged) else bad.nonzero()[:, 0])[0]),
            )


def _refuse(name: str, bad: torch.Tensor, first: int) -> None:
    error, what = (RewardError, "rewards") if name in _REWARDS else (NonFiniteError, "numbers")
    raise error(
        f"{what} are not finite",
        field=name,
        got=f"{int(bad.sum())} NaN or infinite, the first in sample {first}",
        remedy=_REMEDIES.get(
            name, "the policy has diverged: lower its learning rate, or resume from an earlier checkpoint"
        ),
    )
