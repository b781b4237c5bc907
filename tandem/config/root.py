"""The whole config of `tandem train`."""

from __future__ import annotations

from tandem.config.actor import ActorConfig, RefConfig
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.cluster import ROLES
from tandem.config.critic import CriticConfig
from tandem.config.data import DataConfig
from tandem.config.model import ModelConfig
from tandem.config.rewards import CustomRewardConfig, RewardModelConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.section import Section
from tandem.config.tables import FULL_KL, needs
from tandem.config.trainer import TrainerConfig


class ActorRolloutRefConfig(Section):
    """The policy in its three parts: trained, sampling, frozen."""

    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()


class TrainConfig(Section):
    """All sections; `tandem.config.load` fills in what nobody set."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    critic: CriticConfig
    reward_model: RewardModelConfig = RewardModelConfig()
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term asks for the reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def exact_kl(self) -> bool:
        """Whether a KL term is exact over the vocabulary, from the reference's hidden states."""
        algorithm, actor = self.algorithm, self.actor_rollout_ref.actor
        in_reward = algorithm.use_kl_in_reward and algorithm.kl_penalty == FULL_KL
        return in_reward or (actor.use_kl_loss and actor.kl_loss_type == FULL_KL)

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator asks for a critic; a user's own might."""
        known = needs(self.algorithm.adv_estimator)
        return known is None or known.critic

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that this run has, of `tandem.config.cluster.ROLES`."""
        absent = {
            "ref": not self.needs_reference,
            "critic": not self.needs_critic,
            "reward_model": not self.reward_model.enable,
            "reward": self.reward_model.enable,
        }
        return tuple(role for role in ROLES if not absent.get(role, False))
