"""What a run needs of its data and its model, found as the run finds it. Nothing is started or written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tandem.algorithms.registry import AdvantageSpec
from tandem.config.root import TrainConfig
from tandem.config.supervised import RMConfig, SFTConfig, SupervisedConfig
from tandem.data.loader import batches_of
from tandem.errors import ConfigError
from tandem.models.loading import load_config, position_limit
from tandem.models.vocabulary import tokenizer_of
from tandem.rewards import Scorer, check_sources, own_reward
from tandem.rewards.combination import Combination, combination_of
from tandem.trainer.casting import Cast, Tenant, cast_roles, configured_placement, tenants
from tandem.trainer.checks import check_algorithms
from tandem.trainer.steps import Plan, plan_run
from tandem.trainer.supervised import Task, rm_task, sft_task
from tandem.workers.data import DataFacts, DataWorker, read_examples, read_prompts


def examine(config: TrainConfig | SupervisedConfig) -> None:
    """Read a run's data with its tokenizer, and check that data, model and rewards go together.

    Raises:
        TandemError: the first thing for which the run would be refused.
    """
    if not isinstance(config, TrainConfig):
        tokenizer = tokenizer_of(config.model)
        read_examples(config.data, partial(task_of(config).dataset, tokenizer=tokenizer))
        return
    prepared = prepare(config)
    if prepared.placed["data"].worker is DataWorker:  # the user's own reads as it likes
        tokenizer = tokenizer_of(config.actor_rollout_ref.model, "actor_rollout_ref.model")
        reads = {} if prepared.reward is None else {"reads": prepared.reward.reads}
        plan_of(config, prepared, read_prompts(config.data, tokenizer, **reads).facts, lambda sentence: None)


class Prepared(NamedTuple):
    """What a run's config names, found and checked.

    Attributes:
        spec: the advantage estimator.
        cast, placed: who plays which role, and where.
        reward: the user's own; None takes each data source's.
        combination: of the parts of the reward; None: reward functions alone say it.
    """

    spec: AdvantageSpec
    cast: Cast
    placed: dict[str, Tenant]
    reward: Scorer | None
    combination: Combination | None


def prepare(config: TrainConfig) -> Prepared:
    """Find and check what a config names: algorithms, worker classes, rewards.

    Raises:
        TandemError: one is not there, or cannot be used.
    """
    spec = check_algorithms(config)
    cast = cast_roles(config, spec)
    placed = tenants(configured_placement(config.trainer), cast)
    reward = own_reward(config.custom_reward_function, config.reward.timeout)
    return Prepared(spec, cast, placed, reward, combination_of(config))


def plan_of(config: TrainConfig, prepared: Prepared, facts: DataFacts, say: Callable[[str], None]) -> Plan:
    """The plan of a run over these data.

    Args:
        say: prints a sentence to the user.

    Raises:
        TandemError: the data go beyond the model's positions, a data source has no reward, there are too few
            rows, or a step cannot be made as the config asks.
    """
    model, data, prompt = config.actor_rollout_ref.model, config.data, facts.longest_prompt
    response = data.max_response_length
    most = position_limit(load_config(model.path, trust_remote_code=model.trust_remote_code))
    if most is not None and prompt + response > most:
        raise ConfigError(
            "the longest prompt and response go beyond the model's positions",
            field="data.max_prompt_length + data.max_response_length",
            got=f"{prompt} (of at most {data.max_prompt_length}) + {response} = {prompt + response}",
            expected=f"at most max_position_embeddings = {most}",
            remedy="lower data.max_response_length, or leave out long prompts: lower data.max_prompt_length "
            "and set data.filter_overlong_prompts=true",
        )
    if "reward" in prepared.cast.played:
        check_sources(facts.sources, prepared.reward, config.reward.sandbox, say)
    return plan_run(config, prepared.spec, batches_of(facts.rows, data.train_batch_size))


def task_of(config: SupervisedConfig) -> Task:
    """What a supervised run learns."""
    if isinstance(config, SFTConfig):
        return sft_task(config)
    assert isinstance(config, RMConfig), "there are two"
    return rm_task(config)
