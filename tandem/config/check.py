"""Every rule that looks at more than one key's type and limits. All that is wrong is found at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tandem.config import placement
from tandem.config.activations import activation_rules, no_activations
from tandem.config.check_correction import CORRECTION_RULES
from tandem.config.check_sampling import SAMPLING_ERRORS, SAMPLING_RULES
from tandem.config.engine import engine_rule
from tandem.config.estimators import ESTIMATOR_RULES
from tandem.config.files import files, keep_best, model, own_code, resume, reward_file
from tandem.config.kernels import fused_head, liger
from tandem.config.lora import REFERENCE_NOTICE, lora_rules, no_lora, second_copy
from tandem.config.pairs import PAIR_RULES
from tandem.config.reference import REFERENCE_RULES
from tandem.config.root import TrainConfig
from tandem.config.rule import C, Rule
from tandem.config.schema import value_at
from tandem.config.section import Section, nearest_remedy
from tandem.config.servers import servers
from tandem.config.tables import ADVANTAGE_KEYS, LOSS_KEYS, loss_options, needs
from tandem.config.unused import (
    ACTOR,
    POLICY,
    REF,
    ROLLOUT,
    TRAIN_ERRORS,
    TRAIN_NOTICES,
    unused_errors,
    unused_notices,
)
from tandem.errors import ConfigError


@dataclass(frozen=True)
class Findings:
    """What the rules found."""

    errors: list[ConfigError]
    notices: list[str]


def check_train(config: TrainConfig, changed: frozenset[str], bad: frozenset[str]) -> Findings:
    """All rules of `tandem train`.

    Args:
        config: the filled-in config.
        changed: the keys that differ from what they would be had nobody set them.
        bad: the keys whose value is a stand-in for a wrong one.
    """
    found = found_by(TRAIN_RULES, config, changed, bad)
    found.errors.extend(unused_errors([*TRAIN_ERRORS, *SAMPLING_ERRORS], config, changed, bad))
    found.notices.extend(unused_notices([*TRAIN_NOTICES, REFERENCE_NOTICE], config, changed, bad))
    return found


def found_by(rules: Iterable[Rule[C]], config: C, changed: frozenset[str], bad: frozenset[str]) -> Findings:
    """What these rules find."""
    results = [
        item for rule in rules if not bad.intersection(rule.reads) for item in rule.check(config, changed)
    ]
    return Findings(
        [item for item in results if isinstance(item, ConfigError)],
        [item for item in results if isinstance(item, str)],
    )


def _mini_batch(name: str) -> Rule[TrainConfig]:
    def check(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
        if name.startswith("critic") and name not in changed:
            return
        mini, whole = value_at(config, name), config.data.train_batch_size
        if mini > whole:
            yield ConfigError(
                "larger than data.train_batch_size",
                field=name,
                got=mini,
                expected=f"at most {whole}, and a divisor of it",
                remedy=f"set {name}={whole}, or raise data.train_batch_size",
            )
        elif whole % mini:
            near = min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: abs(d - mini))
            yield ConfigError(
                "does not divide data.train_batch_size",
                field=name,
                got=mini,
                expected=f"a divisor of {whole}",
                remedy=f"the nearest is {name}={near}",
            )

    return Rule((name, "data.train_batch_size"), check)


def token_budget(
    switch: str,
    budget: str,
    lengths: tuple[str, ...],
    runs: Callable[[Any], bool] = lambda config: True,
    *,
    reads: tuple[str, ...] = (),
    source: Callable[[Any], bool] = lambda config: False,
) -> Rule[Any]:
    """A token budget must hold one sequence of the greatest length, if its phase runs and uses it.

    Args:
        switch, budget: the keys.
        lengths: the keys whose sum is the greatest length.
        runs: whether the phase runs; it looks at the keys `reads`.
        source: whether the phase whose budget an unset `budget` inherits uses it; then the error is
            reported there.
    """

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        longest, got = sum(value_at(config, name) for name in lengths), value_at(config, budget)
        own = budget in changed or not source(config)
        if own and runs(config) and value_at(config, switch) and got < longest:
            yield ConfigError(
                "holds less than one sequence of the greatest length",
                field=budget,
                got=got,
                expected=f"at least {longest} tokens ({' + '.join(lengths)})",
                remedy=f"set {budget}={longest}, or shorten the sequences",
            )

    return Rule((switch, budget, *lengths, *reads), check)


def unsplit(name: str, what: str) -> Rule[Any]:
    """A key that would split `what` over devices."""

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        if value_at(config, name) > 1:
            yield ConfigError(
                f"this build keeps {what} on one device",
                field=name,
                got=value_at(config, name),
                expected="1; further devices take further samples",
                remedy=f"set {name}=1",
            )

    return Rule((name,), check)


def _options(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    """Options by name, for the estimator and the policy loss."""
    loss, known = config.actor_rollout_ref.actor.policy_loss, needs(config.algorithm.adv_estimator)
    own = {f"algorithm.{name}" for name in ADVANTAGE_KEYS}
    own |= {f"{ACTOR}.{name}" for name in LOSS_KEYS}
    for field, kwargs, options in (
        ("algorithm.adv_kwargs", config.algorithm.adv_kwargs, known and known.options),
        (f"{ACTOR}.policy_loss.kwargs", loss.kwargs, loss_options(loss.loss_mode)),
    ):
        section = "algorithm" if field.startswith("algorithm") else ACTOR
        free = [name for name in options or () if f"{section}.{name}" not in own]
        for name in kwargs:
            if f"{section}.{name}" in own:
                remedy = f"set {section}.{LOSS_KEYS.get(name, name)} instead"
                yield ConfigError(
                    "has a key of its own", field=f"{field}.{name}", got=kwargs[name], remedy=remedy
                )
            elif options is not None and name not in free:
                yield ConfigError(
                    "unknown option",
                    field=f"{field}.{name}",
                    got=kwargs[name],
                    expected="one of " + ", ".join(free) if free else "no options",
                    remedy=nearest_remedy(name, free),
                )


def _validation_sampling(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError | str]:
    sampling, at = config.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    if sampling.do_sample and sampling.temperature == 0:
        yield ConfigError(
            "temperature 0 is greedy",
            field=f"{at}.do_sample",
            got="true",
            expected=f"a {at}.temperature above 0",
            remedy=f"set {at}.temperature=1.0, or {at}.do_sample=false",
        )
    if not sampling.do_sample and sampling.n > 1:
        yield f"{at}.n={sampling.n}: greedy responses to one prompt are all the same; one would do."


def validation_data(config: Any, changed: frozenset[str]) -> Iterator[ConfigError]:
    if config.data.val_files:
        return
    asked = {"trainer.test_freq": config.trainer.test_freq > 0}
    if isinstance(config, TrainConfig):
        asked["trainer.val_only"] = config.trainer.val_only
    for field, asks in asked.items():
        if asks:
            yield ConfigError(
                "asks for validation, and there are no validation files",
                field=field,
                got=value_at(config, field),
                remedy="set data.val_files, or remove this key",
            )


def restarts(config: Any, changed: frozenset[str]) -> Iterator[str]:
    trainer = config.trainer
    if trainer.max_restarts > 0 and trainer.save_freq < 1:
        yield "trainer.max_restarts: without checkpoints a restart begins anew; set trainer.save_freq."


def _reward_model(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    """With a reward model there is one, and no second source of rewards."""
    if not config.reward_model.enable:
        return
    if not config.reward_model.model.path:
        yield ConfigError(
            "missing",
            field="reward_model.model.path",
            expected="a Hugging Face folder of a sequence classifier with one label",
            remedy="add reward_model.model.path=…, or set reward_model.enable=false",
        )
    if config.custom_reward_function.path is not None:
        yield ConfigError(
            "a second source of rewards, beside custom_reward_function.path",
            field="reward_model.enable",
            got="true",
            remedy="set reward_model.enable=false, or remove custom_reward_function.path",
        )


def min_tokens(name: str) -> Rule[Any]:
    """No more tokens are asked for than a response may have."""
    longest = "data.max_response_length"

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        least, most = value_at(config, name), value_at(config, longest)
        if least > most:
            yield ConfigError(
                "longer than the longest response",
                field=name,
                got=least,
                expected=f"at most {longest}={most}",
                remedy=f"set {name}={most} or less, or raise {longest}",
            )

    return Rule((name, longest), check)


def _logprobs_mode(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    """Training needs log-probs under the distribution sampled from, or under the one it computes itself,
    softmax(logits / temperature); raw ones are the latter's where the temperature is 1."""
    rollout, field = config.actor_rollout_ref.rollout, f"{ROLLOUT}.logprobs_mode"
    remedy = f"set {field}=processed_logprobs"
    if rollout.logprobs_mode.endswith("logits"):
        yield ConfigError(
            "training needs log-probs, not logits", field=field, got=rollout.logprobs_mode, remedy=remedy
        )
    elif rollout.logprobs_mode == "raw_logprobs" and rollout.temperature != 1:
        yield ConfigError(
            "raw log-probs leave out the temperature, by which training divides the logits",
            field=field,
            got=f"raw_logprobs with {ROLLOUT}.temperature={rollout.temperature}",
            remedy=f"{remedy}, or {ROLLOUT}.temperature=1.0",
        )


def _log_prob_budget(
    at: str, runs: Callable[[TrainConfig], bool] = lambda config: True, reads: tuple[str, ...] = ()
) -> Rule[Any]:
    switch, budget = f"{at}.log_prob_use_dynamic_bsz", f"{at}.log_prob_max_token_len_per_gpu"
    actor = f"{ACTOR}.use_dynamic_bsz"
    return token_budget(
        switch, budget, _LENGTHS, runs, reads=reads, source=lambda config: bool(value_at(config, actor))
    )


_LENGTHS = ("data.max_prompt_length", "data.max_response_length")
_PLACES = ("trainer.resource_pools", "trainer.placement")
_SPLITS = (
    *(f"{at}.ulysses_sequence_parallel_size" for at in (ACTOR, REF, "critic", "reward_model")),
    *(f"{at}.fsdp_config.fsdp_size" for at in (ACTOR, REF, "critic", "reward_model")),
    *(f"{at}.fsdp_config.tensor_parallel_size" for at in (ACTOR, REF, "critic", "reward_model")),
    *(f"{at}.fsdp_config.pipeline_parallel_size" for at in (ACTOR, REF, "critic", "reward_model")),
    *_PLACES,
)

TRAIN_RULES: list[Rule[TrainConfig]] = [
    files("data.train_files"),
    files("data.val_files"),
    Rule(("custom_reward_function.path",), reward_file),
    model(f"{POLICY}.model.path", "config.json"),
    model(f"{POLICY}.model.tokenizer_path", "tokenizer_config.json"),
    model("critic.model.path", "config.json"),
    model("reward_model.model.path", "config.json"),
    Rule(("reward_model.enable", "reward_model.model.path", "custom_reward_function.path"), _reward_model),
    fused_head(f"{POLICY}.model"),
    *(liger(f"{at}.model") for at in (POLICY, "critic", "reward_model")),
    engine_rule(f"{ACTOR}.fsdp_config", f"{POLICY}.model"),
    engine_rule(f"{REF}.fsdp_config", f"{POLICY}.model", trains=False),
    engine_rule("critic.fsdp_config", "critic.model"),
    engine_rule("reward_model.fsdp_config", "reward_model.model", trains=False),
    own_code("algorithm.adv_estimator"),
    own_code(f"{ACTOR}.policy_loss.loss_mode"),
    *CORRECTION_RULES,
    _mini_batch(f"{ACTOR}.ppo_mini_batch_size"),
    _mini_batch("critic.ppo_mini_batch_size"),
    token_budget(f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu", _LENGTHS),
    _log_prob_budget(
        REF, lambda config: config.needs_reference, (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
    ),
    _log_prob_budget(ROLLOUT),
    token_budget(
        "critic.use_dynamic_bsz",
        "critic.ppo_max_token_len_per_gpu",
        _LENGTHS,
        lambda config: config.needs_critic,
        reads=("algorithm.adv_estimator",),
    ),
    token_budget(
        "critic.use_dynamic_bsz",
        "critic.forward_max_token_len_per_gpu",
        _LENGTHS,
        lambda config: config.needs_critic,
        reads=("algorithm.adv_estimator",),
        source=lambda config: config.critic.use_dynamic_bsz,
    ),
    token_budget(
        "reward_model.use_dynamic_bsz",
        "reward_model.forward_max_token_len_per_gpu",
        _LENGTHS,
        lambda config: config.reward_model.enable,
        reads=("algorithm.adv_estimator", "reward_model.enable"),
        source=lambda config: config.needs_critic and config.critic.use_dynamic_bsz,
    ),
    *activation_rules(f"{POLICY}.model"),
    *activation_rules("critic.model"),
    no_activations("reward_model.model"),
    *lora_rules(f"{POLICY}.model"),
    *lora_rules("critic.model"),
    no_lora("reward_model.model"),
    Rule((f"{POLICY}.model.lora_rank", f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"), second_copy),
    *REFERENCE_RULES,
    Rule(_PLACES, placement.placement),
    Rule((*_PLACES, "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.backend"), placement.devices),
    Rule((*_PLACES, "trainer.worker_classes"), placement.worker_classes),
    Rule(("trainer.cluster.address",), placement.address),
    Rule(_SPLITS, placement.model_split),
    Rule((f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.name", *_PLACES), placement.rollout_split),
    servers(ROLLOUT, training=True),
    *ESTIMATOR_RULES,
    Rule(("algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"), _options),
    *PAIR_RULES,
    Rule((f"{ROLLOUT}.val_kwargs.do_sample", f"{ROLLOUT}.val_kwargs.temperature"), _validation_sampling),
    min_tokens(f"{ROLLOUT}.min_tokens"),
    min_tokens(f"{ROLLOUT}.val_kwargs.min_tokens"),
    Rule((f"{ROLLOUT}.logprobs_mode", f"{ROLLOUT}.temperature"), _logprobs_mode),
    Rule(("data.val_files", "trainer.test_freq", "trainer.val_only"), validation_data),
    Rule(("trainer.max_restarts", "trainer.save_freq"), restarts),
    Rule(("trainer.keep_best", "trainer.test_freq"), keep_best),
    Rule(("trainer.resume_mode", "trainer.resume_from_path"), resume),
    *SAMPLING_RULES,
]
