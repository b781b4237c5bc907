"""Load and check the data, model and algorithms of a run, before anything is started or written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from tandem.algorithms.kl import FULL
from tandem.algorithms.registry import AdvantageSpec, advantage_estimator, kl_estimator, policy_loss
from tandem.config.changed_models import limit_name, position_limit
from tandem.config.cluster import kind_of
from tandem.config.facts import Engine, engines
from tandem.config.root import TrainConfig
from tandem.config.supervised import RMConfig, SFTConfig, SupervisedConfig
from tandem.config.trainer import RunConfig
from tandem.data.loader import batches_of
from tandem.errors import ConfigError
from tandem.models.ends import stop_token_ids
from tandem.models.loading import load_config, positions_of
from tandem.models.vocabulary import tokenizer_of
from tandem.rewards import Reads, Scorer, check_sources, own_reward
from tandem.rewards.combination import Combination, combination_of
from tandem.trainer.casting import GroupPlan, RolePlan, plan_roles
from tandem.trainer.planning import on_cpu
from tandem.trainer.steps import Plan, plan_run
from tandem.trainer.supervised import Task, rm_task, sft_task
from tandem.workers.correction import Correction
from tandem.workers.data import DataFacts, DataWorker, read_examples, read_prompts


class Prepared(NamedTuple):
    """A checked run config, with the algorithms, classes and tokenizer that the config names.

    Attributes:
        config: The config of the run.
        spec: The advantage estimator.
        role_plan: The roles of the run, and the worker class of each role.
        placed: A dict from role to worker group, with the processes of each group.
        reward: The user's reward function; None if each data source uses its built-in reward.
        combination: How the scores of reward functions and reward models are combined into one reward; None
            if the run has no reward models.
        tokenizer: The tokenizer of the policy.
        stops: The tokens that end a response.
    """

    config: TrainConfig
    spec: AdvantageSpec
    role_plan: RolePlan
    placed: dict[str, GroupPlan]
    reward: Scorer | None
    combination: Combination | None
    tokenizer: PreTrainedTokenizerBase
    stops: tuple[int, ...]

    @property
    def reads(self) -> dict[str, Reads]:
        """The columns that the user's reward function reads, as a keyword argument; {} without a function."""
        return {} if self.reward is None else {"reads": self.reward.reads}

    @property
    def engines(self) -> list[Engine]:
        """The engines that this run has."""
        kinds = {kind_of(role) for role in self.role_plan.played}
        return [engine for kind, engine in engines(self.config).items() if kind in kinds]

    def plan(self, facts: DataFacts, say: Callable[[str], None]) -> Plan:
        """Return the plan of a run on this data.

        Args:
            facts: What the data workers found in the data.
            say: Prints a sentence for the user.

        Raises:
            TandemError: A sequence is longer than the model's positions, a data source has no reward, there
                are too few rows, or a step cannot be computed as the config asks.
        """
        config, prompt = self.config, facts.longest_prompt
        model, data = config.actor_rollout_ref.model, config.data
        response = data.max_response_length
        positions = positions_of(load_config(model.path, trust_remote_code=model.trust_remote_code))
        most = position_limit(positions)
        if most is not None and prompt + response > most:
            raise ConfigError(
                "the longest prompt and response together are longer than the model's positions",
                field="data.max_prompt_length + data.max_response_length",
                got=f"{prompt} (of at most {data.max_prompt_length}) + {response} = {prompt + response}",
                expected=f"at most {limit_name(positions)} = {most}",
                remedy="lower data.max_response_length; or lower data.max_prompt_length and set "
                "data.filter_overlong_prompts=true to leave out long prompts; or stretch the positions with "
                "actor_rollout_ref.model.override_config.rope_scaling",
            )
        if "reward" in self.role_plan.played:
            check_sources(facts.sources, self.reward, config.reward.sandbox, say)
        return plan_run(config, self.spec, batches_of(facts.rows, data.train_batch_size))


def prepare(config: TrainConfig) -> Prepared:
    """Load and check the algorithms, worker classes, rewards and tokenizer that a config names.

    Raises:
        TandemError: An algorithm, class, reward or tokenizer does not exist or cannot be used.
    """
    model, spec = config.actor_rollout_ref.model, check_algorithms(config)
    role_plan, placed = plan_roles(config, spec)
    reward = own_reward(config.custom_reward_function, config.reward.timeout)
    combination = combination_of(config)
    tokenizer = tokenizer_of(model, "actor_rollout_ref.model")
    stops = stop_token_ids(model.path, tokenizer)
    return Prepared(config, spec, role_plan, placed, reward, combination, tokenizer, stops)


def check_algorithms(config: TrainConfig) -> AdvantageSpec:
    """Check that all algorithms of a config exist and accept their options; return the advantage estimator.

    Raises:
        ConfigError: An algorithm does not exist, or does not accept an option.
    """
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    Correction(algorithm.rollout_correction)
    kinds = {algorithm.kl_penalty} if algorithm.use_kl_in_reward else set()
    kinds |= {actor.kl_loss_type} if actor.use_kl_loss else set()
    spec = advantage_estimator(algorithm.adv_estimator)
    several = config.actor_rollout_ref.ref.models
    if several and "ref_log_probs" in spec.columns:
        raise ConfigError(
            f"{spec.name} reads the log-probs of one reference, but there are several references",
            field="actor_rollout_ref.ref.models",
            got=", ".join(several),
            remedy="remove this key, or choose another algorithm.adv_estimator",
        )
    for field, changes in (
        ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward),
        ("reward_model.overlong_buffer.enable", config.reward_model.overlong_buffer.enable),
    ):
        if changes and "token_level_rewards" not in spec.columns:
            raise ConfigError(
                f"this changes the token-level rewards, which {spec.name} does not read",
                field=field,
                got="true",
                expected="false",
                remedy="return the penalty as a component of the reward function, or choose another "
                "algorithm.adv_estimator",
            )
    spec.select_options({}, algorithm.adv_kwargs)  # raises if an option is not accepted
    policy_loss(actor.policy_loss.loss_mode).select_options({}, actor.policy_loss.kwargs)
    for kind in kinds - {FULL}:
        kl_estimator(kind.removesuffix("+"))
    return spec


def say_idle_offload(trainer: RunConfig, engines: Sequence[Engine], say: Callable[[str], None]) -> None:
    """Tell the user which offload options have no effect on a CPU.

    Parameters and optimizer state are in host memory already, and activations stay where they are.

    Args:
        trainer: The `trainer` section of the config.
        engines: The engines of the run.
        say: Prints a sentence for the user.

    Raises:
        ConfigError: The run needs a device of this machine, and this machine has none of that kind.
    """
    if not on_cpu(trainer):
        return
    parts = {
        engine.key(part): getattr(engine.section, part)
        for part in ("fsdp_config", "optim")
        for engine in engines
        if hasattr(engine.section, part)
    }
    offloads = ("param_offload", "optimizer_offload")
    idle = [f"{at}.{key}" for at, part in parts.items() for key in offloads if getattr(part, key, False)]
    on_host = [at for at, part in parts.items() if getattr(part, "optimizer", "") == "adamw_cpu"]
    idle += [f"{at}.optimizer=adamw_cpu" for at in on_host]
    if idle:
        say(f"{', '.join(idle)}: no effect on a CPU, where everything is in host memory already.")
    models = {engine.model_at: engine.model for engine in engines}
    for at in (at for at, model in models.items() if model.enable_activation_offload):
        say(f"{at}.enable_activation_offload: on a CPU nothing is moved; its size is only counted.")


def examine(config: TrainConfig | SupervisedConfig) -> None:
    """Read a run's data with its tokenizer, and check that data, model and rewards fit together.

    Raises:
        TandemError: The run cannot start. The error names the first reason.
    """
    if not isinstance(config, TrainConfig):
        tokenizer = tokenizer_of(config.model)
        read_examples(config.data, partial(task_of(config).dataset, tokenizer=tokenizer))
        return
    prepared = prepare(config)
    if prepared.placed["data"].worker is DataWorker:  # a worker class of the user's own reads its own way
        read = read_prompts(config.data, prepared.tokenizer, **prepared.reads)
        prepared.plan(read.facts, lambda sentence: None)


def task_of(config: SupervisedConfig) -> Task:
    """Return the task that a supervised run learns."""
    if isinstance(config, SFTConfig):
        return sft_task(config)
    assert isinstance(config, RMConfig), "a supervised config is SFTConfig or RMConfig"
    return rm_task(config)
