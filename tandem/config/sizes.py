"""The sizes that follow from a config, for `--dry-run`."""

from __future__ import annotations

from tandem.config.root import TrainConfig


def derived(config: TrainConfig, *, train_rows: int | None = None) -> dict[str, int | str]:
    """Return the sizes that follow from a config, as a dict from name to size in display order.

    Sizes are batch sizes, lengths and limits in tokens, and numbers of steps.

    Args:
        config: the loaded config.
        train_rows: the number of training prompts after filtering, if known. With it, the result contains the
            number of steps.
    """
    data, policy, trainer = config.data, config.actor_rollout_ref, config.trainer
    actor = policy.actor
    prompts, n = data.train_batch_size, policy.rollout.n
    mini_batches = prompts // actor.ppo_mini_batch_size
    sizes: dict[str, int | str] = {
        "devices": trainer.world_size,
        "prompts per step": prompts,
        **_sampling_sizes(config),
        "samples per step": prompts * n,
        "longest sequence": data.longest,
        "tokens per step at most": prompts * n * data.longest,
        "actor mini-batches per step": mini_batches,
        "samples per actor mini-batch": actor.ppo_mini_batch_size * n,
        "actor optimizer steps per step": mini_batches * actor.ppo_epochs,
        "micro-batches, actor update": str(actor.train_batching),
        "micro-batches, old log-probs": str(policy.rollout.log_prob_batching),
    }
    if trainer.resolved_backend == "ray":
        sizes |= _places(config)
    if config.needs_reference:
        sizes["micro-batches, reference log-probs"] = str(policy.ref.log_prob_batching)
    if config.needs_critic:
        sizes |= _critic_sizes(config)
    if config.reward_model.enable:
        sizes["micro-batches, reward model"] = str(config.reward_model.forward_batching)
    if train_rows is not None:
        sizes["steps per epoch"] = train_rows // prompts
    steps = total_steps(config, train_rows)
    if steps is not None:
        sizes["steps"] = steps
        sizes["actor optimizer steps"] = (
            max(0, steps - trainer.critic_warmup) * mini_batches * actor.ppo_epochs
        )
    return sizes


def _sampling_sizes(config: TrainConfig) -> dict[str, int | str]:
    """Return sizes that vary between steps, and sizes that include samples that training does not use."""
    sizes: dict[str, int | str] = {}
    rollout = config.actor_rollout_ref.rollout
    if config.algorithm.filter_groups.enable:
        sizes["prompts per generation batch"] = config.data.prompts_at_a_time
    if rollout.n_schedule:
        spans = ", ".join(f"{n} from step {step}" for step, n in rollout.group_sizes.items())
        sizes["responses per prompt"] = f"{spans}; the sizes below assume {rollout.n}"
    return sizes


def total_steps(config: TrainConfig, train_rows: int | None) -> int | None:
    """Return the number of training steps; None if it depends on an unknown number of rows.

    The last, incomplete batch of an epoch is left out.
    """
    if train_rows is None:
        return config.trainer.total_training_steps
    return config.trainer.steps(train_rows // config.data.train_batch_size)


def _places(config: TrainConfig) -> dict[str, int | str]:
    """Return, for each pool, its processes per node and its roles."""
    trainer = config.trainer
    places: dict[str, int | str] = {"backend": "ray"}
    for name, counts in trainer.pools.items():
        roles = [role for role in config.roles if trainer.placed(role) == name]
        processes = "1 process" if sum(counts) == 1 else f"{' + '.join(map(str, counts))} processes"
        places[f"pool {name}"] = f"{processes}: {', '.join(roles) or 'no role of this run'}"
    return places


def _critic_sizes(config: TrainConfig) -> dict[str, int | str]:
    critic = config.critic
    mini_batches = config.data.train_batch_size // critic.ppo_mini_batch_size
    return {
        "critic mini-batches per step": mini_batches,
        "critic optimizer steps per step": mini_batches * critic.ppo_epochs,
        "micro-batches, critic update": str(critic.train_batching),
        "micro-batches, values": str(critic.forward_batching),
    }
