"""Where verl does otherwise with a key of both: its defaults, and an aggregation that it does not read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.schema import keys, shown
from tandem.config.tables import POLICY_LOSS_ALIASES, published_aggregation
from tandem.peers.table import Reading, read_table
from tandem.peers.translate import Translation

_FOUND = read_table("verl_defaults.yaml")

DEFAULTS: Mapping[str, Any] = _FOUND["taken"]
"""Key → verl's default, of those that `trainer.defaults=verl` takes."""

KEPT: Mapping[str, tuple[Any, str]] = {name: (value, why) for name, (value, why) in _FOUND["kept"].items()}
"""Key → verl's default, and why ours stays. Where files lie depends on none, what is learnt on
`loss_agg_mode` alone, with gspo, and a notice says so."""


def differing(given: Collection[str]) -> str:
    """A sentence that lists the defaults that count, are others in verl, and were not given."""
    ours = keys(TrainConfig)
    rows = [
        f"{name}={ours[name].inherits or shown(ours[name].default)} (verl: {shown(value)})"
        for name, value in DEFAULTS.items()
        if name not in given
    ]
    return f"Other defaults than verl's, which trainer.defaults=verl takes: {'; '.join(rows)}."


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
