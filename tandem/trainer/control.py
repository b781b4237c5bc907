"""A control run at learning rate zero, which finds faults of the setup.

The run is built from its config and takes two steps that must not change the weights. If rollout and training
still differ, or the two steps differ, the cause is a fault of the setup and not of learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.schema import value_at
from tandem.lifetime import scratch_folder
from tandem.trainer.assembly import build_ppo
from tandem.trainer.quiet import quiet

_PROMPTS = 8
_OF_THE_MAXIMUM = 50.0
"""The limit for the log-prob difference of a single token, as a multiple of the limit for the mean."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A metric that must be at most its floor in both steps, and have equal values in both steps.

    Attributes:
        name: The name of the metric.
        first: The value in the first step.
        second: The value in the second step.
        floor: The largest value that rounding explains.
    """

    name: str
    first: float
    second: float
    floor: float

    @property
    def at_floor(self) -> bool:
        """Whether both values and their difference are within the floor; False for NaN."""
        values = (self.first, self.second, self.first - self.second)
        return all(abs(value) <= self.floor for value in values)


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of a control run.

    Attributes:
        probes: All measured numbers.
        causes: One sentence for each fault; empty if there are no faults.
    """

    probes: tuple[Probe, ...]
    causes: tuple[str, ...]


def run_control(config: TrainConfig, *, say: Callable[[str], None]) -> Report:
    """Take two steps on the same few prompts, in a temporary run folder, without a checkpoint.

    Args:
        config: The config of the run.
        say: Prints a sentence for the user.

    Raises:
        TandemError: The run cannot be built, or a step fails. If weights do not reach the rollout, the error
            is a WeightSyncError that names these weights.
    """
    with scratch_folder("check", shared_place(config)) as folder:
        trainer = build_ppo(controlled(config, folder / "run"), say=say)
        try:
            before = trainer.roles.actor.weight_digest()
            prompts = trainer.prompts.next()
            first, second = (trainer.step(number, prompts) for number in (1, 2))
            after = trainer.roles.actor.weight_digest()
        finally:
            trainer.shutdown()
    changed = [name for name in before if before[name] != after[name]]
    if "rollout/log_prob_diff_limit" not in first:
        say("The rollout returns no log-probs, so its difference from training was not measured.")
    limit = first.get("rollout/log_prob_diff_limit", math.nan)  # present if the rollout returns log-probs
    floors = {
        "rollout/log_prob_diff_mean": limit,
        "rollout/log_prob_diff_max": _OF_THE_MAXIMUM * limit,
        "rollout/kl": limit,
        "rollout/version_lag": 0.0,
        "rollout/changed_samples": 0.0,
        "actor/ppo_kl": limit,
        "actor/clip_fraction": 0.0,
        "actor/kl": limit,
    }
    probes = [
        Probe(name, first[name], second.get(name, math.nan), floor)
        for name, floor in floors.items()
        if name in first and not math.isnan(floor)
    ]
    probes.append(Probe("weights changed", 0.0, float(len(changed)), 0.0))
    causes = list(trainer.session.watch.named.values())
    if changed:
        causes.append(f"Weights changed although the learning rate is 0; the first is {changed[0]}.")
    if not causes:
        causes = [
            f"{probe.name} is {probe.first:.3g}, then {probe.second:.3g}; rounding does not explain this."
            for probe in probes
            if not probe.at_floor
        ]
    return Report(tuple(probes), tuple(causes))


def controlled(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return a copy of the config with learning rate zero and few prompts. The run writes to `folder`."""
    trainer, data = config.trainer, config.data
    prompts = min(data.train_batch_size, max(_PROMPTS, *map(trainer.devices_of, ("actor", "rollout"))))
    changes: dict[str, Any] = {
        "data.train_batch_size": prompts,
        "data.gen_batch_size": None,
        "data.val_files": (),
        "algorithm.filter_groups.enable": False,  # both steps must have the same prompts
        "trainer.critic_warmup": 0,
        "trainer.samples_freq": -1,
    }
    for at in ("actor_rollout_ref.actor", "critic"):
        whole = value_at(config, f"{at}.ppo_mini_batch_size") >= data.train_batch_size
        changes[f"{at}.ppo_mini_batch_size"] = prompts if whole else -(-prompts // 2)
        changes[f"{at}.optim.lr"] = 0.0
    return quiet(config, folder, 2, changes)


def shared_place(config: TrainConfig) -> Path | None:
    """Return the folder in which to create the temporary run folder; None for the system's default.

    Workers on other machines can access a folder next to the run folder.
    """
    if config.trainer.resolved_backend == "local":
        return None
    run = Path(config.trainer.default_local_dir).absolute()
    return next(folder for folder in run.parents if folder.is_dir())
