"""The interface of a check of a run's steps, and the facts about the run that checks need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.root import TrainConfig
from tandem.protocol import SamplingParams

Row = Mapping[str, float]
Numbers = tuple[float | str, ...] | None
"""A check's result: the numbers for the sentence about a problem; None without a problem."""
Check = Callable[..., Numbers]
"""A check: a function with the name of the problem that it finds."""
_POSITIVE_KL = {"abs", "k2", "mse", "k3", "low_var_kl", "full"}


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a run that checks of its steps need.

    Attributes:
        sampling: the sampling parameters of the run.
        temperature: the temperature of training.
        prompts: prompts per step.
        updates: updates of the actor per step.
        recompute_old: whether the old log-probs are computed in a separate forward before the first update.
        experiments: whether the actor can find the cause of a problem by additional forward passes.
        learns: whether the configured learning rate is above zero.
        kl_is_positive: whether the KL estimate cannot be negative.
    """

    sampling: SamplingParams
    temperature: float
    prompts: int
    updates: int
    recompute_old: bool
    experiments: bool = False
    learns: bool = True
    kl_is_positive: bool = False

    @classmethod
    def of(cls, config: TrainConfig, sampling: SamplingParams, **more: Any) -> Facts:
        """Return the facts of a run with this config.

        Args:
            config: the config.
            sampling: the sampling parameters of the run.
            **more: the facts that the config does not contain.
        """
        actor = config.actor_rollout_ref.actor
        return cls(
            sampling,
            config.actor_rollout_ref.rollout.temperature,
            config.data.train_batch_size,
            learns=actor.optim.lr > 0,
            kl_is_positive=actor.use_kl_loss and actor.kl_loss_type.rstrip("+") in _POSITIVE_KL,
            **more,
        )


def findings(checks: Mapping[Check, str], *seen: object) -> Iterator[tuple[str, str]]:
    """Yield (name of the check, sentence) for each check that finds a problem.

    Args:
        checks: a dict from check to a sentence with placeholders for the check's numbers.
        *seen: the arguments of the checks.
    """
    for check, sentence in checks.items():
        if (numbers := check(*seen)) is not None:
            yield check.__name__, sentence.format(*numbers)
