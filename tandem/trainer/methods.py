"""The table of the methods that a run calls on each role, with the config key that asks for them. A worker
class of the user's own is held against it before anything is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.algorithms.registry import AdvantageSpec
from tandem.config.root import TrainConfig
from tandem.errors import ConfigError
from tandem.runtime import Worker
from tandem.runtime.worker import registrations

Asks = Callable[[TrainConfig, AdvantageSpec], bool]


@dataclass(frozen=True, slots=True)
class Need:
    """Methods that are called together.

    Attributes:
        methods: by role.
        key: the config key that asks for them; empty for what is no key's.
        asked: whether a config with this advantage estimator does.
        apart: whether they are called only where the rollout is no part of the actor.
    """

    methods: Mapping[str, tuple[str, ...]]
    key: str = ""
    asked: Asks = lambda config, spec: True
    apart: bool = False


def _resets_reference(config: TrainConfig, _: AdvantageSpec) -> bool:
    return config.needs_reference and config.actor_rollout_ref.ref.reset_interval > 0


NEEDS = (
    Need(
        {
            "actor": ("compute_log_prob", "update_actor", "save_checkpoint", "load_checkpoint"),
            "rollout": ("generate_sequences",),
            "ref": ("compute_ref_log_prob",),
            "critic": ("compute_values", "update_critic", "save_checkpoint", "load_checkpoint"),
            "reward_model": ("compute_rm_score",),
            "reward": ("compute_scores",),
            "batch": ("compute_advantages", "measure", "measure_validation", "write_samples"),
            "data": ("describe", "train_batch", "val_batch"),
        }
    ),
    Need({"actor": ("weight_buckets", "export_weights"), "rollout": ("load_weights",)}, apart=True),
    Need(
        {"ref": ("reference_head",), "actor": ("hold_reference_head",)},
        "algorithm.kl_penalty, actor_rollout_ref.actor.kl_loss_type",
        lambda config, _: config.exact_kl,
    ),
    Need(
        {
            "ref": ("load_reference", "save_reference", "restore_reference"),
            "actor": ("weight_buckets", "export_weights", "reset_optimizer"),
        },
        "actor_rollout_ref.ref.reset_interval",
        _resets_reference,
    ),
    Need(
        {"batch": ("reward_baselines",)},
        "algorithm.adv_estimator",
        lambda _, spec: "reward_baselines" in spec.columns,
    ),
    Need(
        {"batch": ("group_spread",), "data": ("recall",)},
        "algorithm.filter_groups.enable",
        lambda config, _: config.algorithm.filter_groups.enable,
    ),
    Need(
        {"batch": ("punish_overlong",)},
        "reward_model.overlong_buffer.enable",
        lambda config, _: config.reward_model.overlong_buffer.enable,
    ),
    Need(
        {"batch": ("left_out",)},
        "algorithm.mask_truncated_completions",
        lambda config, _: config.algorithm.mask_truncated_completions,
    ),
    Need(
        {"batch": ("combine_scores",)},
        "reward_model.enable, reward.combine",
        lambda config, _: config.reward_model.enable or config.reward.combine is not None,
    ),
    Need(
        {"batch": ("running_scores",)},
        "reward_model.models",
        lambda config, _: any(term.normalize for term in config.reward_model.scorers.values()),
    ),
    Need({"batch": ("stand_in", "left_out")}, "reward.on_error", lambda config, _: config.leaves_out_failed),
    Need(
        {"data": ("observe", "sampler_state", "load_sampler_state")},
        "data.sampler.class_name",
        lambda config, _: config.data.sampler.class_name is not None,
    ),
    Need(
        {"actor": ("begin_save", "check_save"), "critic": ("begin_save", "check_save")},
        "trainer.async_save",
        lambda config, _: config.trainer.async_save,
    ),
    Need(
        {"ref": ("begin_save_reference", "check_save_reference")},
        "trainer.async_save",
        lambda config, spec: config.trainer.async_save and _resets_reference(config, spec),
    ),
)
"""A rollout with `stream_sequences` too has its samples scored as they finish; `take_observed` and
`take_timings` are called where they are offered."""


def needs_of(config: TrainConfig, spec: AdvantageSpec) -> tuple[Need, ...]:
    """The rows of `NEEDS` that a run has."""
    return tuple(need for need in NEEDS if need.asked(config, spec))


def require_methods(
    worker: type[Worker], parts: frozenset[str], needs: Sequence[Need], *, role: str, apart: bool = False
) -> None:
    """Refuses a worker class that lacks what the run calls.

    Args:
        parts: the roles it is to play.
        needs: of the run.
        role: in `trainer.worker_classes`, for the message.
        apart: whether actor and rollout are groups of their own.

    Raises:
        ConfigError: names what is missing, and the key that asks for it.
    """
    wanted: dict[str, list[str]] = {}
    for need in needs:
        if apart or not need.apart:
            for part in sorted(parts):
                wanted.setdefault(need.key, []).extend(need.methods.get(part.partition(".")[0], ()))
    for key, methods in wanted.items():
        missing = [method for method in methods if method not in registrations(worker)]
        if missing:
            raise ConfigError(
                f"asks for methods that the worker class of role {role} lacks"
                if key
                else "the worker class lacks methods that the loop calls",
                field=key or f"trainer.worker_classes.{role}",
                got=f"{worker.__name__} without {', '.join(missing)}",
                expected=f"methods with @register: {', '.join(methods)}",
                remedy=f"add them, or derive trainer.worker_classes.{role} from the class it replaces",
            )
