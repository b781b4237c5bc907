"""The whole config of `tandem train`."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.config.actor import ActorConfig, RefConfig
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.cluster import ROLES
from tandem.config.critic import CriticConfig
from tandem.config.data import DataConfig
from tandem.config.model import ModelConfig
from tandem.config.rewards import CombinedRewardConfig, CustomRewardConfig, RewardModelConfig
from tandem.config.rollout import RolloutConfig, ends_early
from tandem.config.section import Section, When, section
from tandem.config.tables import FULL_KL, needs
from tandem.config.trainer import TrainerConfig
from tandem.config.view import root

_COMPARES = When(
    lambda own: root(own).needs_reference,
    "if {actor.use_kl_loss}=true or algorithm.use_kl_in_reward=true",
    notice=True,
)
_CRITIC = When(lambda own: own.needs_critic, "if algorithm.adv_estimator uses a critic", notice=True)

_FUNCTIONS = When(
    lambda own: own.calls_functions,
    "if reward functions are called, which reward_model.enable=true alone does not do",
)
_CALLS = ("num_workers", "timeout", "retries", "max_growth_mb", "sandbox")


class ActorRolloutRefConfig(Section):
    """The policy in its three roles: trained (actor), sampling (rollout) and frozen (ref)."""

    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = section(RefConfig(), when=_COMPARES)
    rollout: RolloutConfig = section(RolloutConfig(), below={"min_tokens": ends_early("rollout.")})


class TrainConfig(Section):
    """The whole config of `tandem train`.

    `tandem.config.load` fills in the values that the user did not set.
    """

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig = section(when=_CRITIC)
    reward_model: RewardModelConfig = RewardModelConfig()
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    reward: CombinedRewardConfig = section(CombinedRewardConfig(), below=dict.fromkeys(_CALLS, _FUNCTIONS))
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term needs the reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def leaves_out_failed(self) -> bool:
        """Whether a sample whose score failed is left out of every update."""
        return self.reward.on_error == "drop"

    @property
    def calls_functions(self) -> bool:
        """Whether reward functions are called, alone or in addition to reward models."""
        beside = self.custom_reward_function.given or self.reward.weight is not None
        return beside or not self.reward_model.enable

    @property
    def reference_is_the_actor(self) -> bool:
        """Whether the actor's base weights serve as the reference policy.

        Then no second copy of the weights is loaded.
        """
        trainer = self.trainer
        together = trainer.placed("ref") == trainer.placed("actor") and "ref" not in trainer.worker_classes
        policy = self.actor_rollout_ref
        return policy.model.lora_rank > 0 and together and not policy.ref.models

    @property
    def exact_kl(self) -> bool:
        """Whether a KL term is exact over the vocabulary, computed from the reference's hidden states."""
        return bool(self.exact_kl_terms)

    @property
    def exact_kl_terms(self) -> frozenset[str]:
        """The KL terms that are exact over the vocabulary: a subset of "reward" and "loss"."""
        algorithm, actor = self.algorithm, self.actor_rollout_ref.actor
        exact = {
            "reward": algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL_KL,
            "loss": actor.use_kl_loss and actor.kl_loss_type == FULL_KL,
        }
        return frozenset(term for term, asked in exact.items() if asked)

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator needs a critic; True for a user-defined estimator."""
        known = needs(self.algorithm.adv_estimator)
        return known is None or known.critic

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that this run has; see `roles_with`."""
        return self.roles_with(reference=self.needs_reference, critic=self.needs_critic)

    def roles_with(self, *, reference: bool, critic: bool) -> tuple[str, ...]:
        """Return the roles of a run, in the order of `tandem.config.cluster.ROLES`.

        If a role has several models, each model is a separate role, named role.NAME.

        Args:
            reference: whether the run has a reference policy.
            critic: whether the run has a critic.
        """
        found: dict[str, Iterable[str]] = {
            "ref": self.actor_rollout_ref.ref.references if reference else (),
            "critic": ("critic",) if critic else (),
            "reward_model": self.reward_model.scorers,
            "reward": ("reward",) if self.calls_functions else (),
        }
        return tuple(name for role in ROLES for name in found.get(role, (role,)))
