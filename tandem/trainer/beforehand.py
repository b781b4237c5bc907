"""What a run needs of its data and its model, found as the run finds it. Nothing is started or written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tandem.algorithms.registry import AdvantageSpec
from tandem.config.root import TrainConfig
from tandem.config.supervised import RMConfig, SFTConfig, SupervisedConfig
from tandem.data.loader import batches_of
from tandem.errors import ConfigError
from tandem.models.loading import load_config, position_limit
from tandem.models.vocabulary import tokenizer_of
from tandem.rewards import Scorer, check_sources, own_reward
from tandem.rewards.combination import combination_of
from tandem.trainer.checks import check_algorithms
from tandem.trainer.placing import cast_roles, configured_placement, tenants
from tandem.trainer.steps import Plan, plan_run
from tandem.trainer.supervised import Task, rm_task, sft_task
from tandem.workers.data import DataFacts, DataWorker, read_examples, read_prompts


def examine(config: TrainConfig | SupervisedConfig) -> None:
    """Read a run's data with its tokenizer, and check that data, model and rewards go together.

    Raises:
        TandemError: the first thing for which the run would be refused.
    """
    if isinstance(config, TrainConfig):
        _examine_prompts(config)
    else:
        tokenizer = tokenizer_of(config.model)
        read_examples(config.data, partial(task_of(config).dataset, tokenizer=tokenizer))


def _examine_prompts(config: TrainConfig) -> None:
    spec = check_algorithms(config)
    cast = cast_roles(config, spec)
    placed = tenants(configured_placement(config.trainer), cast)
    reward = own_reward(config.custom_reward_function, config.reward.timeout)
    combination_of(config)
    if placed["data"].worker is not DataWorker:
        return  # the user's own reads as it likes
    tokenizer = tokenizer_of(config.actor_rollout_ref.model, "actor_rollout_ref.model")
    reads = {} if reward is None else {"reads": reward.reads}
    facts = read_prompts(config.data, tokenizer, **reads).facts
    plan_of(config, spec, facts, reward, scores="reward" in cast.played, say=lambda sentence: None)


def plan_of(
    config: TrainConfig,
    spec: AdvantageSpec,
    facts: DataFacts,
    reward: Scorer | None,
    *,
    scores: bool,
    say: Callable[[str], None],
) -> Plan:
    """The plan of a run over these data.

    Args:
        spec: the advantage estimator.
        reward: the user's own; None takes each data source's.
        scores: whether the run scores by functions.
        say: prints a sentence to the user.

    Raises:
        TandemError: the data go beyond the model's positions, a data source has no reward, there are too few
            rows, or a step cannot be made as the config asks.
    """
    _require_positions(config, facts.longest_prompt)
    if scores:
        check_sources(facts.sources, reward, config.reward.sandbox, say)
    return plan_run(config, spec, batches_of(facts.rows, config.data.train_batch_size))


def _require_positions(config: TrainConfig, prompt: int) -> None:
    """
    Args:
        prompt: tokens of the longest.

    Raises:
        ConfigError: it and the longest response go beyond the model's positions. Of a model whose rotary
            angles are stretched, its rollout engine judges.
    """
    model, response = config.actor_rollout_ref.model, config.data.max_response_length
    most = position_limit(load_config(model.path, trust_remote_code=model.trust_remote_code))
    if most is not None and prompt + response > most:
        raise ConfigError(
            "the longest prompt and response go beyond the model's positions",
            field="data.max_prompt_length + data.max_response_length",
            got=f"{prompt} (of at most {config.data.max_prompt_length}) + {response} = {prompt + response}",
            expected=f"at most max_position_embeddings = {most}",
            remedy="lower data.max_response_length, or leave out long prompts: lower data.max_prompt_length "
            "and set data.filter_overlong_prompts=true",
        )


def task_of(config: SupervisedConfig) -> Task:
    """What a supervised run learns."""
    if isinstance(config, SFTConfig):
        return sft_task(config)
    assert isinstance(config, RMConfig), "there are two"
    return rm_task(config)
