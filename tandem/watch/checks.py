"""What a check of a run is, and what it must know about the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.root import TrainConfig
from tandem.protocol import SamplingParams

Row = Mapping[str, float]
Numbers = tuple[float | str, ...] | None
"""The numbers for the sentence that says what is wrong; None if nothing is wrong."""
Check = Callable[..., Numbers]
"""A function whose name is the name of the problem that it finds."""
_POSITIVE_KL = {"abs", "k2", "mse", "k3", "low_var_kl", "full"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What must be known about a run to check its steps.

    Attributes:
        sampling: how its samples are drawn.
        temperature: the temperature of training.
        prompts: prompts per step.
        updates: updates of the actor per step.
        recompute_old: whether the updates compare with log-probs that were computed before the first update.
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
            sampling: how its samples are drawn.
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
    """Yield the names of the checks that find a problem, each with its sentence.

    Args:
        checks: the checks, each with a sentence that has placeholders for the numbers that the check returns.
        *seen: the arguments of the checks.
    """
    for check, sentence in checks.items():
        if (numbers := check(*seen)) is not None:
            yield check.__name__, sentence.format(*numbers)
