"""The routers of a mixture of experts: how they are trained, and which choice of experts is replayed."""

from __future__ import annotations

from typing import Any, Literal

from tandem.config.needs import Check
from tandem.config.section import Section, key
from tandem.config.view import root


class MixtureConfig(Section):
    """The routers of a mixture of experts. Models without experts ignore this section.

    Attributes:
        router_aux_loss_coef: Weight of a loss that is lowest if every sequence uses all experts equally often
            (DeepSeek-V3's sequence-wise balance loss). It is summed over layers and averaged over sequences.
        router_z_loss_coef: Weight of a loss that keeps router logits small: the square of their logsumexp,
            summed over layers and averaged over tokens.
        router_bias_update_rate: After each update, how far the router's bias moves for each expert: up if the
            expert had fewer tokens than the mean, down if it had more. Only for models whose routers have
            such a bias (e_score_correction_bias), and without LoRA.
        freeze_router: Do not train the weights of routers.
    """

    router_aux_loss_coef: float = key(0.0, ge=0)
    router_z_loss_coef: float = key(0.0, ge=0)
    router_bias_update_rate: float = key(0.0, ge=0)
    freeze_router: bool = False


def _records(rollout: Any) -> bool:
    return rollout.name in ("native", "hf", "vllm") and not rollout.on_servers


_RECORDED = Check(
    lambda own, mode: mode == "R3" and not _records(root(own).actor_rollout_ref.rollout),
    "this rollout engine does not return the experts of its tokens",
    got="{=} with {actor_rollout_ref.rollout.name=} and {actor_rollout_ref.rollout.mode=}",
    expected="{actor_rollout_ref.rollout.name}=native, hf, or vllm with "
    "{actor_rollout_ref.rollout.mode}=colocate; or {}=R2",
)
_CACHED = Check(
    lambda own, mode: (
        mode == "R3"
        and root(own).actor_rollout_ref.rollout.name == "vllm"
        and not root(own).actor_rollout_ref.rollout.enable_prefix_caching
    ),
    "vLLM records experts only with prefix caching",
    got="{=} with {actor_rollout_ref.rollout.enable_prefix_caching=}",
    expected="{actor_rollout_ref.rollout.enable_prefix_caching}=true",
)
_NO_STAGES = Check(
    lambda own, mode: (
        mode != "disabled" and root(own).actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size > 1
    ),
    "pipeline stages do not replay the choice of experts",
    got="{=} with {actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size=}",
    expected="{actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size}=1",
)
_HAS_PASS = Check(
    lambda own, mode: mode == "R2" and root(own).algorithm.rollout_correction.bypass_mode,
    "R2 replays the pass of the old log-probs, which bypass mode leaves out",
    got="{=} with {algorithm.rollout_correction.bypass_mode=}",
    expected="{algorithm.rollout_correction.bypass_mode}=false, or {}=R3",
)


def _updates_once(own: Any, mode: str) -> bool:
    actor, batch = root(own).actor_rollout_ref.actor, root(own).data.train_batch_size
    return mode == "R2" and actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == batch


_UPDATES = Check(
    _updates_once,
    "{}=R2: little or no effect, because there is only one update per step.",
    notice=True,
)


class RouterReplayConfig(Section):
    """Replay of the choice of experts in the policy's updates. Models without experts cannot use it.

    Attributes:
        mode: The experts that compute each token in the policy's updates. disabled: those that the routers
            choose in the update. R2: those that they chose when the old log-probs were computed. R3: those
            that they chose when the rollout generated the tokens, also for the old log-probs (arXiv
            2510.11370). The reference policy and the critic always choose experts themselves.
    """

    mode: Literal["disabled", "R2", "R3"] = key(
        "disabled", needs=(_RECORDED, _CACHED, _NO_STAGES, _HAS_PASS, _UPDATES)
    )
