"""Rules that look at several keys, or at the file system. All that is wrong is found at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tandem.config.root import TrainConfig
from tandem.config.schema import value_at
from tandem.config.section import Section, nearest_remedy
from tandem.config.sft import SFTConfig
from tandem.config.tables import loss_options, needs
from tandem.config.unused import (
    ACTOR,
    POLICY,
    REF,
    ROLLOUT,
    SFT_ERRORS,
    SFT_NOTICES,
    TRAIN_ERRORS,
    TRAIN_NOTICES,
    unused_errors,
    unused_notices,
    uses_critic,
)
from tandem.errors import ConfigError

C = TypeVar("C", bound=Section)

MAX_DEVICES = 1
"""The local backend, the only one of this build, is one process."""


@dataclass(frozen=True)
class Findings:
    """What the rules found."""

    errors: list[ConfigError]
    notices: list[str]


@dataclass(frozen=True)
class Rule(Generic[C]):
    """A rule over several keys.

    Attributes:
        reads: the keys it looks at; with a wrong value in one of them it stays silent.
        check: yields errors, and notices as plain sentences.
    """

    reads: tuple[str, ...]
    check: Callable[[C, frozenset[str]], Iterable[ConfigError | str]]


def check_train(config: TrainConfig, changed: frozenset[str], bad: frozenset[str]) -> Findings:
    """All rules of `tandem train`.

    Args:
        config: the filled-in config.
        changed: the keys that differ from what they would be had nobody set them.
        bad: the keys whose value is a stand-in for a wrong one.
    """
    found = _found(TRAIN_RULES, config, changed, bad)
    found.errors.extend(unused_errors(TRAIN_ERRORS, config, changed, bad))
    found.notices.extend(unused_notices(TRAIN_NOTICES, config, changed, bad))
    return found


def check_sft(config: SFTConfig, changed: frozenset[str], bad: frozenset[str]) -> Findings:
    """All rules of `tandem sft`; as `check_train`."""
    found = _found(SFT_RULES, config, changed, bad)
    found.errors.extend(unused_errors(SFT_ERRORS, config, changed, bad))
    found.notices.extend(unused_notices(SFT_NOTICES, config, changed, bad))
    return found


def _found(rules: Iterable[Rule[C]], config: C, changed: frozenset[str], bad: frozenset[str]) -> Findings:
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


def _token_budget(
    switch: str,
    budget: str,
    lengths: tuple[str, ...],
    runs: Callable[[Any], bool] = lambda config: True,
    *,
    reads: tuple[str, ...] = (),
    source_switch: str | None = None,
) -> Rule[Any]:
    """A token budget must hold one sequence of the greatest length, if its phase runs and uses it.

    Args:
        switch, budget: the keys.
        lengths: the keys whose sum is the greatest length.
        runs: whether the phase runs; it looks at the keys `reads`.
        source_switch: the switch of the phase whose budget an unset `budget` inherits; where that
            phase uses its budget, the error is reported there.
    """

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        longest, got = sum(value_at(config, name) for name in lengths), value_at(config, budget)
        own = source_switch is None or budget in changed or not value_at(config, source_switch)
        if own and runs(config) and value_at(config, switch) and got < longest:
            yield ConfigError(
                "holds less than one sequence of the greatest length",
                field=budget,
                got=got,
                expected=f"at least {longest} tokens ({' + '.join(lengths)})",
                remedy=f"set {budget}={longest}, or shorten the sequences",
            )

    return Rule((switch, budget, *lengths, *reads), check)


def _devices(config: Any, changed: frozenset[str]) -> Iterator[ConfigError]:
    trainer = config.trainer
    if trainer.world_size > MAX_DEVICES:
        yield ConfigError(
            "more than one process",
            field="trainer.n_gpus_per_node" if trainer.n_gpus_per_node > 1 else "trainer.nnodes",
            got=f"{trainer.n_gpus_per_node} per node × {trainer.nnodes} nodes = {trainer.world_size}",
            expected="1: this build's only backend, local, runs one process",
            remedy="set trainer.n_gpus_per_node=1 trainer.nnodes=1",
        )


def _parallel(name: str) -> Rule[TrainConfig]:
    def check(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
        if value_at(config, name) > MAX_DEVICES:
            yield ConfigError(
                "more devices than there are",
                field=name,
                got=value_at(config, name),
                expected="1: this build's only backend, local, runs one process",
                remedy=f"set {name}=1",
            )

    return Rule((name,), check)


def _group_size(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError | str]:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    known = needs(estimator)
    if known is None or not known.group or n > 1:
        return
    if estimator == "rloo":
        yield ConfigError(
            "rloo leaves one sample of a prompt out, and there is only one",
            field=f"{ROLLOUT}.n",
            got=n,
            expected=">= 2",
            remedy=f"set {ROLLOUT}.n=4, or another algorithm.adv_estimator",
        )
    else:
        yield f"{ROLLOUT}.n=1: {estimator} compares the samples of a prompt, and there is only one."


def _options(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    """Options by name, for the estimator and the policy loss."""
    loss, known = config.actor_rollout_ref.actor.policy_loss, needs(config.algorithm.adv_estimator)
    own = {f"algorithm.{name}" for name in ("gamma", "lam", "norm_adv_by_std_in_grpo")}
    own |= {f"{ACTOR}.{name}" for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    for field, kwargs, options in (
        ("algorithm.adv_kwargs", config.algorithm.adv_kwargs, known and known.options),
        (f"{ACTOR}.policy_loss.kwargs", loss.kwargs, loss_options(loss.loss_mode)),
    ):
        section = "algorithm" if field.startswith("algorithm") else ACTOR
        free = [name for name in options or () if f"{section}.{name}" not in own]
        for name in kwargs:
            if f"{section}.{name}" in own:
                remedy = f"set {section}.{name} instead"
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


def _validation_data(config: Any, changed: frozenset[str]) -> Iterator[ConfigError]:
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


def _resume(config: Any, changed: frozenset[str]) -> Iterator[ConfigError]:
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode != "resume_path":
        return
    if path is None or not os.path.isdir(path):
        yield ConfigError(
            "missing" if path is None else "no such folder",
            field="trainer.resume_from_path",
            got=path,
            expected="a checkpoint folder, for trainer.resume_mode=resume_path",
            remedy="name one, or set trainer.resume_mode=auto",
        )


def _files(*names: str) -> Rule[Any]:
    """Every one of these keys that is set names existing files."""

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        for name in names:
            value = value_at(config, name)
            for path in (value,) if isinstance(value, str) else value or ():
                if not os.path.isfile(path):
                    yield ConfigError("no such file", field=name, got=path, remedy="check the path")

    return Rule(names, check)


def _reward_file(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    """A reward function's file exists; the dotted name of a module is looked up when it is loaded."""
    field, path = "custom_reward_function.path", config.custom_reward_function.path
    if path is not None and (path.endswith(".py") or os.sep in path) and not os.path.isfile(path):
        yield ConfigError("no such file", field=field, got=path, remedy="check the path")


def _own_code(name: str) -> Rule[TrainConfig]:
    """A user's own function in a file: the file exists. What is in it is checked when it is loaded."""

    def check(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
        file, colon, _ = value_at(config, name).rpartition(":")
        if colon and file.endswith(".py") and not os.path.isfile(file):
            yield ConfigError("no such file", field=name, got=file, remedy="check the path before the colon")

    return Rule((name,), check)


def _model(name: str, marker: str) -> Rule[Any]:
    """A key, if not inherited, names a local folder with the file `marker`."""

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        folder = value_at(config, name)
        if name not in changed or os.path.isfile(os.path.join(folder, marker)):
            return
        remedy = "check the path; a model of the Hugging Face hub must be downloaded first"
        yield ConfigError(
            "not a model folder" if os.path.isdir(folder) else "no such folder",
            field=name,
            got=folder,
            expected=f"a Hugging Face folder with {marker}",
            remedy=remedy,
        )

    return Rule((name,), check)


def _log_prob_budget(
    at: str, runs: Callable[[TrainConfig], bool] = lambda config: True, reads: tuple[str, ...] = ()
) -> Rule[Any]:
    switch, budget = f"{at}.log_prob_use_dynamic_bsz", f"{at}.log_prob_max_token_len_per_gpu"
    return _token_budget(
        switch, budget, _LENGTHS, runs, reads=reads, source_switch=f"{ACTOR}.use_dynamic_bsz"
    )


def _critic_budget(phase: str, source_switch: str | None = None) -> Rule[Any]:
    switch, budget = "critic.use_dynamic_bsz", f"critic.{phase}_max_token_len_per_gpu"
    reads = ("algorithm.adv_estimator",)
    return _token_budget(switch, budget, _LENGTHS, uses_critic, reads=reads, source_switch=source_switch)


_LENGTHS = ("data.max_prompt_length", "data.max_response_length")

TRAIN_RULES: list[Rule[TrainConfig]] = [
    _files("data.train_files"),
    _files("data.val_files"),
    Rule(("custom_reward_function.path",), _reward_file),
    _model(f"{POLICY}.model.path", "config.json"),
    _model(f"{POLICY}.model.tokenizer_path", "tokenizer_config.json"),
    _model("critic.model.path", "config.json"),
    _own_code("algorithm.adv_estimator"),
    _own_code(f"{ACTOR}.policy_loss.loss_mode"),
    _mini_batch(f"{ACTOR}.ppo_mini_batch_size"),
    _mini_batch("critic.ppo_mini_batch_size"),
    _token_budget(f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu", _LENGTHS),
    _log_prob_budget(
        REF, lambda config: config.needs_reference, (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
    ),
    _log_prob_budget(ROLLOUT),
    _critic_budget("ppo"),
    _critic_budget("forward", source_switch="critic.use_dynamic_bsz"),
    Rule(("trainer.n_gpus_per_node", "trainer.nnodes"), _devices),
    _parallel(f"{ACTOR}.ulysses_sequence_parallel_size"),
    _parallel("critic.ulysses_sequence_parallel_size"),
    _parallel(f"{ROLLOUT}.tensor_model_parallel_size"),
    Rule(("algorithm.adv_estimator", f"{ROLLOUT}.n"), _group_size),
    Rule(("algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"), _options),
    Rule((f"{ROLLOUT}.val_kwargs.do_sample", f"{ROLLOUT}.val_kwargs.temperature"), _validation_sampling),
    Rule(("data.val_files", "trainer.test_freq", "trainer.val_only"), _validation_data),
    Rule(("trainer.resume_mode", "trainer.resume_from_path"), _resume),
]

SFT_RULES: list[Rule[SFTConfig]] = [
    _files("data.train_files"),
    _files("data.val_files"),
    _model("model.path", "config.json"),
    _model("model.tokenizer_path", "tokenizer_config.json"),
    _token_budget("use_dynamic_bsz", "max_token_len_per_gpu", ("data.max_length",)),
    Rule(("trainer.n_gpus_per_node", "trainer.nnodes"), _devices),
    Rule(("data.val_files", "trainer.test_freq"), _validation_data),
    Rule(("trainer.resume_mode", "trainer.resume_from_path"), _resume),
]
