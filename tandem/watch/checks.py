"""What a check of a run is, and what it must know of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.root import TrainConfig
from tandem.protocol import SamplingParams

Row = Mapping[str, float]
Numbers = tuple[float | str, ...] | None
"""Of the sentence that says what is wrong; None where all is well."""
Check = Callable[..., Numbers]
"""A function of what it looks at; what it finds has its name."""
_POSITIVE_KL = {"abs", "k2", "mse", "k3", "low_var_kl", "full"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What must be known of a run to judge its steps.

    Attributes:
        sampling: how its samples are drawn.
        temperature: of training.
        prompts: of a step.
        updates: of the actor in a step.
        recompute_old: whether these compare with log-probs that were computed before the first.
        experiments: whether the actor can tell causes apart by further forwards.
        learns: whether the learning rate that is asked for is not zero.
        kl_is_positive: whether the KL's estimate cannot be negative.
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
        """Return those of a run with this config.

        Args:
            more: those that are not in the config.
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
    """The names of the checks that find something wrong, each with its sentence.

    Args:
        checks: with their sentences, in which the numbers that they return have places.
        seen: what they look at.
    """
    for check, sentence in checks.items():
        if (numbers := check(*seen)) is not None:
            yield check.__name__, sentence.format(*numbers)
