"""The reference policy among the members of a checkpoint, and what the loop of a particular run calls on a
worker class of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.algorithms.registry import AdvantageSpec
from tandem.config.root import TrainConfig

_EXACT = {"ref": ("reference_head",), "actor": ("hold_reference_head",)}
_RESET = {
    "ref": ("load_reference", "save_reference", "restore_reference"),
    "actor": ("weight_buckets", "export_weights", "reset_optimizer"),
}
_BASELINES = {"batch": ("reward_baselines",)}


class ReferenceMember:
    """The reference among the groups whose state goes into checkpoints: it may be part of the actor's group,
    which saves the actor by the usual methods.

    Args:
        group: the reference's.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def save_checkpoint(self, path: Path) -> None:
        """Into the empty folder `path`."""
        self._group.save_reference(path)

    def load_checkpoint(self, path: Path) -> None:
        """Goes on with what was saved."""
        self._group.restore_reference(path)

    def begin_save(self, path: Path) -> None:
        """The same as `save_checkpoint` while training goes on."""
        self._group.begin_save_reference(path)

    def check_save(self) -> None:
        """
        Raises:
            Exception: what a write begun by `begin_save` met with.
        """
        self._group.check_save_reference()


def further_methods(config: TrainConfig, spec: AdvantageSpec) -> dict[str, tuple[str, ...]]:
    """What the loop of this run calls on roles besides `tandem.trainer.roles.METHODS`, by role."""
    found: dict[str, tuple[str, ...]] = {}
    resets = config.needs_reference and config.actor_rollout_ref.ref.reset_interval > 0
    for table, needed in (
        (_EXACT, config.exact_kl),
        (_RESET, resets),
        (_BASELINES, "reward_baselines" in spec.columns),
    ):
        for role, methods in table.items() if needed else ():
            found[role] = (*found.get(role, ()), *methods)
    return found
