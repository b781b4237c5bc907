"""Keys that verl treats differently: keys with other defaults, and a loss aggregation that verl ignores."""

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
"""A dict from key to verl's default. The config key `trainer.defaults=verl` applies these defaults."""

KEPT: Mapping[str, tuple[Any, str]] = {name: (value, why) for name, (value, why) in _FOUND["kept"].items()}
"""A dict from key to (verl's default, the reason why `trainer.defaults=verl` does not apply it).

None of these keys affects the location of files. Only `loss_agg_mode` affects training, and only with gspo; a
notice then tells the user.
"""


def differing(given: Collection[str]) -> str:
    """Return a sentence that lists verl's defaults that differ and that the user did not override."""
    ours = keys(TrainConfig)
    rows = [
        f"{name}={ours[name].inherits or shown(ours[name].default)} (verl: {shown(value)})"
        for name, value in DEFAULTS.items()
        if name not in given
    ]
    return f"These defaults differ from verl's (trainer.defaults=verl selects verl's): {'; '.join(rows)}."


IGNORES_AGGREGATION = ("geo_mean", "sapo")
"""Policy losses that verl 0.9.1 averages by sequence for every value of `loss_agg_mode`."""

_ACTOR, _CRITICS = "actor_rollout_ref.actor", "critic.loss_agg_mode"
_MODE = f"{_ACTOR}.loss_agg_mode"


def averaged_by_verl(found: Translation) -> Translation:
    """Return the translation of verl's keys with the loss aggregation that verl really uses.

    For some losses, verl ignores `loss_agg_mode`. The critic inherits this key, and keeps the given value.
    """
    loss = str(found.given.get(f"{_ACTOR}.policy_loss.loss_mode"))
    loss, mode = POLICY_LOSS_ALIASES.get(loss, loss), found.given.get(_MODE)
    published = published_aggregation(loss)
    if loss not in IGNORES_AGGREGATION or mode in (None, published):
        return found
    given = {name: value for name, value in found.given.items() if name != _MODE}
    if mode != published_aggregation(""):  # the critic keeps the given value
        given.setdefault(_CRITICS, mode)
    sentence = f"verl ignores this key for {loss} and uses {published}, as the loss was published"
    return replace(found, given=given, readings=[*found.readings, Reading(_MODE, mode, "ignored", sentence)])
