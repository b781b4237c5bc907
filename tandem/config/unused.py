"""Keys that count only together with others. Setting one where it does nothing is an error if it
would change results, a notice if it only concerns speed, memory or a part that does not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tandem.config.generate import EvalConfig
from tandem.config.pipeline import schedule
from tandem.config.root import TrainConfig
from tandem.config.schema import value_at
from tandem.config.supervised import SupervisedConfig
from tandem.config.tables import (
    SERVER_ENGINES,
)
from tandem.config.unused_algorithm import ALGORITHM_ERRORS
from tandem.config.unused_optim import optimizer_errors, optimizer_notices
from tandem.config.use import C, Use
from tandem.errors import ConfigError

POLICY = "actor_rollout_ref"
ACTOR, REF, ROLLOUT = f"{POLICY}.actor", f"{POLICY}.ref", f"{POLICY}.rollout"


def unused_errors(
    uses: Sequence[Use[C]], config: C, changed: frozenset[str], bad: frozenset[str]
) -> Iterator[ConfigError]:
    """An error for each key that does nothing although it says what should come out."""
    for use in uses:
        for name in use.unused(config, changed, bad):
            yield ConfigError(
                "has no effect",
                field=name,
                got=value_at(config, name),
                expected=f"set only {use.condition}",
                remedy="set that too, or remove this key",
            )


def unused_notices(
    uses: Sequence[Use[C]], config: C, changed: frozenset[str], bad: frozenset[str]
) -> Iterator[str]:
    """A sentence for each reason why keys do nothing; a key appears in one."""
    told: set[str] = set()
    for use in uses:
        names = [name for name in use.unused(config, changed, bad) if name not in told]
        told.update(names)
        if names:
            yield f"{', '.join(names)}: no effect; counts only {use.condition}."


def _cut(by_tokens: str, samples: str, tokens: str) -> list[Use[Any]]:
    """The rules of one phase's micro-batches: either its token key counts or its sample key."""
    return [
        Use(
            (samples,),
            (by_tokens,),
            lambda config: not value_at(config, by_tokens),
            f"with {by_tokens}=false",
        ),
        Use(
            (tokens,),
            (by_tokens,),
            lambda config: bool(value_at(config, by_tokens)),
            f"with {by_tokens}=true",
        ),
    ]


def _with_engine(at: str, names: Sequence[str], engines: Sequence[str]) -> Use[Any]:
    """Keys of the rollout section, which lies at path `at`, that only these engines read."""
    name = f"{at}.name"
    return Use(
        tuple(f"{at}.{key}" for key in names),
        (name,),
        lambda config: value_at(config, name) in engines,
        f"with {name}={' or '.join(engines)}",
    )


def _kernels(at: str) -> Use[Any]:
    """The head's kernels, of the model section that lies at path `at`."""
    switch = f"{at}.use_fused_kernels"
    return Use(
        (f"{at}.fused_kernel_options.impl_backend",),
        (switch,),
        lambda config: bool(value_at(config, switch)),
        f"with {switch}=true",
    )


def _engine_errors(at: str) -> list[Use[Any]]:
    name, mode = f"{at}.name", f"{at}.mode"
    on_servers: Use[Any] = Use(
        (f"{at}.server.",),
        (name, mode),
        lambda config: (
            value_at(config, name) in SERVER_ENGINES
            or (value_at(config, name) == "vllm" and value_at(config, mode) == "server")
        ),
        f"with {name}={' or '.join(SERVER_ENGINES)}, or with {name}=vllm and {mode}=server",
    )
    only_vllms: Use[Any] = Use(
        (f"{at}.server.weights_backend",),
        (name,),
        lambda config: value_at(config, name) not in SERVER_ENGINES,
        f"with {name}=vllm",
    )
    return [_with_engine(at, ("mode",), ("vllm",)), on_servers, only_vllms]


def _engine_notices(at: str) -> list[Use[Any]]:
    native = ("runner", "block_size", "num_gpu_blocks_override", "enable_chunked_prefill")
    in_process = ("gpu_memory_utilization", "enable_prefix_caching", "enforce_eager")
    return [_with_engine(at, native, ("native",)), _with_engine(at, in_process, ("native", "vllm"))]


_RESUME: Use[Any] = Use(
    ("trainer.resume_from_path",),
    ("trainer.resume_mode",),
    lambda config: config.trainer.resume_mode == "resume_path",
    "with trainer.resume_mode=resume_path",
)

_BEST: Use[Any] = Use(
    ("trainer.keep_best_mode",),
    ("trainer.keep_best",),
    lambda config: config.trainer.keep_best is not None,
    "with trainer.keep_best",
)

_REWARD_FUNCTION: Use[Any] = Use(
    ("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
    ("custom_reward_function.path",),
    lambda config: config.custom_reward_function.path is not None,
    "with custom_reward_function.path",
)

_PROCESSES = tuple(
    f"trainer.{name}" for name in ("backend", "n_gpus_per_node", "nnodes", "resource_pools", "placement")
)

_PROCESSES_NOTICES: list[Use[Any]] = [
    Use(
        ("trainer.cluster.", "trainer.timeouts.", "trainer.max_restarts"),
        _PROCESSES,
        lambda config: config.trainer.resolved_backend == "ray",
        "with more than one process, or trainer.backend=ray",
    ),
    Use(
        ("trainer.balance_batch",),
        _PROCESSES,
        lambda config: any(sum(counts) > 1 for counts in config.trainer.pools.values()),
        "with a pool of more than one process",
    ),
    Use(
        ("trainer.cluster.object_store_gb", "trainer.cluster.temp_dir"),
        ("trainer.cluster.address",),
        lambda config: config.trainer.cluster.address is None,
        "with trainer.cluster.address=null, where Ray is started for the run",
    ),
]

_REWARD_MODEL_BATCHES = (
    "use_dynamic_bsz",
    "forward_micro_batch_size_per_gpu",
    "forward_max_token_len_per_gpu",
)

TRAIN_ERRORS: list[Use[TrainConfig]] = [
    *ALGORITHM_ERRORS,
    _REWARD_FUNCTION,
    Use(
        ("trainer.critic_warmup",),
        ("algorithm.adv_estimator",),
        lambda config: config.needs_critic,
        "with an algorithm.adv_estimator that has a critic",
    ),
    *_engine_errors(ROLLOUT),
    *optimizer_errors(f"{ACTOR}.optim", lambda config: config.actor_rollout_ref.actor.optim),
    *optimizer_errors("critic.optim", lambda config: config.critic.optim),
    _RESUME,
    _BEST,
]

TRAIN_NOTICES: list[Use[TrainConfig]] = [
    Use(
        ("critic.",),
        ("algorithm.adv_estimator",),
        lambda config: config.needs_critic,
        "with an algorithm.adv_estimator that has a critic",
    ),
    Use(
        tuple(
            f"reward_model.{name}"
            for name in ("model.", "fsdp_config.", *_REWARD_MODEL_BATCHES, "ulysses_sequence_parallel_size")
        ),
        ("reward_model.enable",),
        lambda config: config.reward_model.enable,
        "with reward_model.enable=true",
    ),
    *_PROCESSES_NOTICES,
    Use(
        (f"{REF}.",),
        (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"),
        lambda config: config.needs_reference,
        f"with {ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true",
    ),
    Use(
        ("data.val_batch_size", "data.val_max_samples", f"{ROLLOUT}.val_kwargs."),
        ("data.val_files",),
        lambda config: bool(config.data.val_files),
        "with data.val_files",
    ),
    Use(
        tuple(f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_k", "top_p", "min_p")),
        (f"{ROLLOUT}.val_kwargs.do_sample",),
        lambda config: config.actor_rollout_ref.rollout.val_kwargs.do_sample,
        f"with {ROLLOUT}.val_kwargs.do_sample=true (without it validation is greedy)",
    ),
    Use(
        (f"{ROLLOUT}.min_tokens", f"{ROLLOUT}.val_kwargs.min_tokens"),
        (f"{ROLLOUT}.ignore_eos", f"{ROLLOUT}.stop"),
        lambda config: (
            not config.actor_rollout_ref.rollout.ignore_eos or bool(config.actor_rollout_ref.rollout.stop)
        ),
        f"with {ROLLOUT}.ignore_eos=false, or with {ROLLOUT}.stop",
    ),
    *_engine_notices(ROLLOUT),
    *optimizer_notices(ACTOR, lambda config: config.actor_rollout_ref.actor.optim),
    *optimizer_notices("critic", lambda config: config.critic.optim),
    _kernels(f"{POLICY}.model"),
    *(schedule(f"{at}.", trains=at in (ACTOR, "critic")) for at in (ACTOR, "critic", REF, "reward_model")),
    Use(
        (f"{ROLLOUT}.update_weights_bucket_megabytes",),
        ("trainer.resource_pools", "trainer.placement", "trainer.worker_classes"),
        lambda config: (
            config.trainer.placed("rollout") != config.trainer.placed("actor")
            or not {"actor", "rollout"}.isdisjoint(config.trainer.worker_classes)
        ),
        "where actor and rollout are apart",
    ),
    Use(("data.seed",), ("data.shuffle",), lambda config: config.data.shuffle, "with data.shuffle=true"),
    *_cut(
        f"{ACTOR}.use_dynamic_bsz",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
    ),
    *(
        use
        for at in (REF, ROLLOUT)
        for use in _cut(
            f"{at}.log_prob_use_dynamic_bsz",
            f"{at}.log_prob_micro_batch_size_per_gpu",
            f"{at}.log_prob_max_token_len_per_gpu",
        )
    ),
    *_cut(
        "reward_model.use_dynamic_bsz",
        "reward_model.forward_micro_batch_size_per_gpu",
        "reward_model.forward_max_token_len_per_gpu",
    ),
    *(
        use
        for phase in ("ppo", "forward")
        for use in _cut(
            "critic.use_dynamic_bsz",
            f"critic.{phase}_micro_batch_size_per_gpu",
            f"critic.{phase}_max_token_len_per_gpu",
        )
    ),
]

SUPERVISED_ERRORS: list[Use[SupervisedConfig]] = [
    *optimizer_errors("optim", lambda config: config.optim),
    _RESUME,
    _BEST,
]

SUPERVISED_NOTICES: list[Use[SupervisedConfig]] = [
    *_PROCESSES_NOTICES,
    _kernels("model"),
    schedule(""),
    *optimizer_notices("", lambda config: config.optim),
    Use(("data.seed",), ("data.shuffle",), lambda config: config.data.shuffle, "with data.shuffle=true"),
    *_cut("use_dynamic_bsz", "micro_batch_size_per_gpu", "max_token_len_per_gpu"),
]

_PROMPTS = (
    "prompt_key",
    "max_prompt_length",
    "max_response_length",
    "filter_overlong_prompts",
    "truncation",
    "apply_chat_template_kwargs",
)

OFFLINE_ERRORS: list[Use[Any]] = _engine_errors("rollout")
OFFLINE_NOTICES: list[Use[Any]] = _engine_notices("rollout")

EVAL_ERRORS: list[Use[EvalConfig]] = [
    *OFFLINE_ERRORS,
    Use(
        ("rollout.", "model.", "trainer.device", *(f"data.{name}" for name in _PROMPTS)),
        ("model.path",),
        lambda config: config.model.path is not None,
        "with model.path",
    ),
    Use(
        ("data.response_key",),
        ("model.path",),
        lambda config: config.model.path is None,
        "without model.path, where the responses are in the data",
    ),
    _REWARD_FUNCTION,
]
