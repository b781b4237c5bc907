"""The aggregation of the losses for which verl does not read the key."""

from __future__ import annotations

from dataclasses import replace

from tandem.config.tables import POLICY_LOSS_ALIASES, published_aggregation
from tandem.config.verl.translate import Reading, Translation

DEAF = ("geo_mean", "sapo")
"""Policy losses that verl 0.9.1 averages by sequence, whatever `loss_agg_mode` says."""

_ACTOR, _CRITICS = "actor_rollout_ref.actor", "critic.loss_agg_mode"
_MODE = f"{_ACTOR}.loss_agg_mode"


def averaged_by_verl(found: Translation) -> Translation:
    """The translation with the aggregation that verl trains with, where that is not what its key says.

    The critic inherits the key, and keeps what was given.
    """
    loss = str(found.given.get(f"{_ACTOR}.policy_loss.loss_mode"))
    loss, mode = POLICY_LOSS_ALIASES.get(loss, loss), found.given.get(_MODE)
    published = published_aggregation(loss)
    if loss not in DEAF or mode in (None, published):
        return found
    given = {name: value for name, value in found.given.items() if name != _MODE}
    if mode != published_aggregation(""):  # the critic's own
        given.setdefault(_CRITICS, mode)
    sentence = f"verl does not read it for {loss}, which it averages as published, {published}"
    return replace(found, given=given, readings=[*found.readings, Reading(_MODE, mode, "ignored", sentence)])
