"""What the config must know of the algorithms without importing them (they need torch). A test holds
these tables against the registries of `tandem.algorithms`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Needs:
    """What an advantage estimator asks for.

    Attributes:
        critic: values of a critic.
        group: several samples of one prompt.
        options: the numbers and switches it takes.
    """

    critic: bool
    group: bool
    options: tuple[str, ...]


ADVANTAGES = {
    "gae": Needs(critic=True, group=False, options=("gamma", "lam")),
    "grpo": Needs(critic=False, group=True, options=("norm_adv_by_std_in_grpo", "epsilon")),
    "rloo": Needs(critic=False, group=True, options=()),
    "reinforce_plus_plus": Needs(critic=False, group=False, options=("gamma",)),
    "reinforce_plus_plus_baseline": Needs(critic=False, group=True, options=()),
}

ADVANTAGE_ALIASES: dict[str, str] = {}

POLICY_LOSSES = {"vanilla": ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
"""Policy loss → the options it takes."""

POLICY_LOSS_ALIASES: dict[str, str] = {}

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)

KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")

ROLLOUT_ENGINES = ("native", "hf", "vllm", "openai", "sglang", "tgi")

SERVER_ENGINES = ("openai", "sglang", "tgi")
"""Those that run on servers."""

FIXED_WEIGHTS = ("openai", "tgi")
"""Those that cannot be given new weights."""

LOGGERS = (
    "console",
    "file",
    "tensorboard",
    "wandb",
    "mlflow",
    "swanlab",
    "vemlp_wandb",
    "clearml",
    "trackio",
)


def needs(estimator: str) -> Needs | None:
    """What an estimator asks for; None for a user's own, which says so itself when it is loaded."""
    return ADVANTAGES.get(ADVANTAGE_ALIASES.get(estimator, estimator))


def loss_options(loss: str) -> tuple[str, ...] | None:
    """The options of a policy loss; None for a user's own."""
    return POLICY_LOSSES.get(POLICY_LOSS_ALIASES.get(loss, loss))
