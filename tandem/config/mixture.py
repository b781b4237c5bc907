"""The section `model.mixture`: how the routers of a mixture of experts are trained."""

from __future__ import annotations

from tandem.config.section import Section, key


class MixtureConfig(Section):
    """The routers of a mixture of experts. Models without experts ignore this section.

    Attributes:
        router_aux_loss_coef: Weight of a loss that is lowest if every sequence uses all experts equally often
            (DeepSeek-V3's sequence-wise balance loss). It is summed over layers and averaged over sequences.
        router_z_loss_coef: Weight of a loss that keeps router logits small: the square of their logsumexp,
            summed over layers and averaged over tokens.
        router_bias_update_rate: After each update, how far the router's bias moves for each expert: up if the
            expert had fewer tokens than the mean, down if it had more. Only for models whose routers have
            such a bias (e_score_correction_bias).
        freeze_router: Do not train the weights of routers.
    """

    router_aux_loss_coef: float = key(0.0, ge=0)
    router_z_loss_coef: float = key(0.0, ge=0)
    router_bias_update_rate: float = key(0.0, ge=0)
    freeze_router: bool = False
