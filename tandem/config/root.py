"""The whole config of `tandem train`."""

from __future__ import annotations

from tandem.config.actor import ActorConfig
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.critic import CriticConfig
from tandem.config.data import DataConfig
from tandem.config.model import ModelConfig
from tandem.config.ref import RefConfig
from tandem.config.reward import CustomRewardConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.section import Section
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
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term asks for the reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss
