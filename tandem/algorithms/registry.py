"""Advantage estimators, policy losses and KL estimators by name.

A function's signature is its declaration. Positional parameters are columns of the batch,
keyword-only parameters are options (numbers, bools, strings, tuples of numbers) with defaults:

    @register_advantage("mean_baseline")
    def mean_baseline(token_level_rewards, response_mask, offsets, *, scale=1.0): ...

The loop reads the declaration and provides what it names; `known_columns` of its kind says what each column
is and has which shape, so that docstrings say of a column only what is its function's own. A user's own
function needs no registration: its name in the config is `path/to/file.py:function` or
`package.module:function`.

Shapes: N tokens of all sequences together, B sequences.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from tandem.errors import ConfigError
from tandem.loading import load_function

Option = bool | int | float | str | tuple[float, ...]
Function = TypeVar("Function", bound=Callable[..., Any])


class Advantages(NamedTuple):
    """An estimator's result; both (N), zero where `response_mask` is false.

    Attributes:
        advantages: weights of the policy gradient.
        returns: what a critic is fitted to.
    """

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class Spec:
    """A registered function and what it needs.

    Attributes:
        name: as registered, or a user's reference.
        fn: the function itself.
        columns: its positional parameters, in order.
        options: its keyword-only parameters with their defaults.
    """

    kind: ClassVar[str]
    known_columns: ClassVar[Mapping[str, str]]
    result: ClassVar[str]

    name: str
    fn: Callable[..., Any]
    columns: tuple[str, ...]
    options: Mapping[str, Option]

    def select_options(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Option]:
        """The options to call with: of `shared` (config keys that many algorithms read) those this
        one declares, and all of `own` (given for this one), which wins.

        Raises:
            ConfigError: an option of `own` that is not declared, or a value of another type.
        """
        chosen = {name: shared[name] for name in self.options if name in shared} | dict(own)
        for name, value in chosen.items():
            if name not in self.options:
                raise ConfigError(
                    f"the {self.kind} '{self.name}' has no such option",
                    field=name,
                    expected=dict(self.options),
                    remedy=_nearest(name, self.options),
                )
            if isinstance(self.options[name], tuple) and isinstance(value, list):
                value = chosen[name] = tuple(value)
            if not _fits(value, self.options[name]):
                raise ConfigError(
                    f"an option of the {self.kind} '{self.name}' has the wrong type",
                    field=name,
                    got=repr(value),
                    expected="a list of numbers"
                    if isinstance(self.options[name], tuple)
                    else type(self.options[name]).__name__,
                )
        return chosen

    def _call(self, columns: Mapping[str, Tensor], options: Mapping[str, Option]) -> Any:
        return self.fn(*(columns[name] for name in self.columns), **options)

    def _tensor(
        self,
        result: Any,
        like: Tensor,
        expected: str = "a tensor",
        fits: Callable[[Tensor], bool] = lambda result: True,
    ) -> Tensor:
        """Return the one tensor that a function gave, of the shape of another; refuse anything else."""
        if not (_all_of_shape((result,), like.shape) and fits(result)):
            raise self._wrong_result(result, f"{expected} of shape {tuple(like.shape)}")
        tensor: Tensor = result
        return tensor

    def _wrong_result(self, got: object, expected: str) -> ConfigError:
        return ConfigError(
            f"the {self.kind} returned something else than {self.result}",
            field=self.name,
            got=_described(got),
            expected=expected,
        )


class AdvantageSpec(Spec):
    """An advantage estimator."""

    kind = "advantage estimator"
    known_columns: ClassVar[Mapping[str, str]] = {
        "token_level_scores": "(N) fp32, the rewards as scored",
        "token_level_rewards": "(N) fp32, scores less the KL penalty where one is taken",
        "values": "(N) fp32, the critic's, predicted before each token",
        "response_mask": "(N) bool, tokens that the policy wrote",
        "old_log_probs": "(N) fp32, nats",
        "ref_log_probs": "(N) fp32, nats",
        "rollout_log_probs": "(N) fp32, nats, of the engine that sampled",
        "rollout_is_weights": "(N) fp32, the rollout correction's importance weights; ones without",
        "sum_pi_squared": "(N) fp32, sum over the vocabulary of pi(v)**2 at the token's position",
        "reward_baselines": "(B) fp32, total reward of the prompt's greedy response",
        "reward_components": "(B, K) fp32, a sequence's rewards by component",
        "group": "(B) int64, which prompt each sequence answers",
        "offsets": "(B+1) int64, where each sequence starts",
    }
    result = "Advantages(advantages, returns)"

    @property
    def needs_critic(self) -> bool:
        return "values" in self.columns

    def __call__(self, columns: Mapping[str, Tensor], **options: Option) -> Advantages:
        """Calls the function with the columns it declares.

        Raises:
            ConfigError: it returned something else than two tensors of the tokens' shape.
        """
        result = self._call(columns, options)
        shape = columns["response_mask"].shape
        if not (isinstance(result, tuple) and len(result) == 2 and _all_of_shape(result, shape)):
            raise self._wrong_result(result, f"two tensors of shape {tuple(shape)}")
        return Advantages(*result)


class Selection(Spec):
    """A choice of tokens over a whole batch, before the updates on it; see `tandem.algorithms.selection`."""

    kind = "choice of tokens"
    known_columns: ClassVar[Mapping[str, str]] = {
        "old_log_probs": "(N) fp32, nats, of the policy before this batch's updates",
        "advantages": "(N) fp32",
        "response_mask": "(N) bool, tokens that the policy wrote",
        "offsets": "(B+1) int64, where each sequence starts",
    }
    result = "(N) bool"

    def __call__(self, columns: Mapping[str, Tensor], options: Mapping[str, Option]) -> Tensor:
        """Calls the function with the columns it declares, and those of the options that are its own.

        Raises:
            ConfigError: it returned something else than a bool per token.
        """
        chosen = self._call(columns, {name: options[name] for name in self.options if name in options})
        mask = columns["response_mask"]
        return self._tensor(chosen, mask, "bools", lambda each: each.dtype == mask.dtype)


SELECTIONS: dict[Callable[..., Any], Selection] = {}
"""By the loss's function."""


class PolicyLossSpec(Spec):
    """A policy loss."""

    kind = "policy loss"
    known_columns: ClassVar[Mapping[str, str]] = {
        "log_probs": "(N) fp32, nats, of the policy being trained; carries the gradient",
        "old_log_probs": "(N) fp32, nats, of the policy before this batch's updates",
        "advantages": "(N) fp32",
        "response_mask": "(N) bool, tokens that the policy wrote",
        "offsets": "(B+1) int64, where each sequence starts",
        "entropy": "(N) fp32, nats; carries the gradient",
        "rollout_log_probs": "(N) fp32, nats, of the engine that sampled",
        "rollout_is_weights": "(N) importance weights of the rollout correction, bounded; ones without; "
        "the losses of a function that does not take them are multiplied by them",
        "selected_tokens": "(N) bool, chosen over the whole batch, see `selects_tokens`",
    }
    result = "(losses per token, {metric: per token})"

    @property
    def selection(self) -> Selection | None:
        """The choice of its `selected_tokens`, whose options are among the loss's own."""
        return SELECTIONS.get(self.fn)

    def __call__(self, columns: Mapping[str, Tensor], **options: Option) -> tuple[Tensor, dict[str, Tensor]]:
        """Calls the function with the columns it declares.

        Raises:
            ConfigError: it returned something else than per-token losses and per-token metrics.
        """
        elsewhere = self.selection.options if self.selection else ()
        own = {name: value for name, value in options.items() if name not in elsewhere}
        result = self._call(columns, own)
        shape = columns["log_probs"].shape
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise self._wrong_result(result, "a tensor and a dict of tensors")
        losses, metrics = result
        if not _all_of_shape((losses, *metrics.values()), shape):
            raise self._wrong_result(result, f"tensors of shape {tuple(shape)}")
        return losses, metrics


class KLSpec(Spec):
    """An estimator of KL(policy || reference) from the tokens sampled."""

    kind = "KL estimator"
    known_columns: ClassVar[Mapping[str, str]] = {
        "log_probs": "(N) fp32, nats, of the policy; may carry the gradient",
        "ref_log_probs": "(N) fp32, nats, of the reference",
    }
    result = "an estimate per token"

    def __call__(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Calls the function with the columns it declares.

        Raises:
            ConfigError: it returned something else than per-token estimates.
        """
        return self._tensor(self._call(columns, {}), columns["log_probs"])


AnySpec = TypeVar("AnySpec", bound=Spec)


class Registry(Generic[AnySpec]):
    """Specs by name and alias.

    Args:
        spec: the class of the specs, which knows the columns allowed.
    """

    def __init__(self, spec: type[AnySpec]) -> None:
        self._spec = spec
        self._specs: dict[str, AnySpec] = {}
        self.aliases: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names registered, without aliases."""
        return tuple(sorted(self._specs))

    def register(self, name: str, *aliases: str) -> Callable[[Function], Function]:
        """A decorator that registers a function and returns it unchanged.

        Raises:
            ConfigError: a name that is another function's, or a signature that is no declaration.
        """

        def decorate(fn: Function) -> Function:
            for each in (name, *aliases):
                known = self._specs.get(self.aliases.get(each, each))
                if known is not None and known.fn is not fn:
                    raise ConfigError(f"this {self._spec.kind}'s name is taken", field=each)
            self._specs[name] = declared(self._spec, name, fn)
            self.aliases.update(dict.fromkeys(aliases, name))
            return fn

        return decorate

    def find(self, name: str) -> AnySpec:
        """The spec of a registered name, an alias, or a user's `file.py:function`.

        Raises:
            ConfigError: no such name, or a user's function that cannot be used.
        """
        if ":" in name:
            fn = load_function(name)
            known = (spec for spec in self._specs.values() if spec.fn is fn)
            return next(known, None) or declared(self._spec, name, fn)
        spec = self._specs.get(self.aliases.get(name, name))
        if spec is None:
            raise ConfigError(
                f"no such {self._spec.kind}",
                field=name,
                expected=", ".join(self.names),
                remedy=_nearest(name, (*self.names, *self.aliases))
                or "your own function is named path/to/file.py:function",
            )
        return spec


def declared(spec: type[AnySpec], name: str, fn: Callable[..., Any]) -> AnySpec:
    """The spec that a function's signature declares.

    Raises:
        ConfigError: the signature is no declaration; the message shows what is expected.
    """
    columns: list[str] = []
    options: dict[str, Option] = {}
    faults: list[str] = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            if not isinstance(parameter.default, bool | int | float | str | tuple):
                faults.append(
                    f"option '{parameter.name}' has no number, bool, string or tuple as its default"
                )
            options[parameter.name] = parameter.default
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            faults.append(f"'{parameter}' names nothing that could be provided")
        elif parameter.name not in spec.known_columns:
            hint = _nearest(parameter.name, spec.known_columns) or "an option must stand after *"
            faults.append(f"'{parameter.name}' is no column ({hint})")
        else:
            columns.append(parameter.name)
    if spec is PolicyLossSpec:
        selection = SELECTIONS.get(fn)
        if ("selected_tokens" in columns) != (selection is not None):
            faults.append("'selected_tokens' and the decorator @selects_tokens(FUNCTION) belong together")
        if selection is not None:  # the options of what chooses the tokens are the loss's too
            twice = [name for name in selection.options if name in options]
            faults += [f"option '{name}' is {selection.name}'s too" for name in twice]
            options.update(selection.options)
    if faults:
        known = "".join(f"\n      {column}: {meaning}" for column, meaning in spec.known_columns.items())
        raise ConfigError(
            f"the signature of this {spec.kind} does not say what to provide: {'; '.join(faults)}",
            field=name,
            got=f"def {getattr(fn, '__name__', 'function')}{inspect.signature(fn)}",
            expected=f"def function(COLUMN, ..., *, OPTION=DEFAULT, ...) -> {spec.result}\n"
            f"    where the columns are any of{known}\n"
            "    and the defaults are numbers, bools, strings or tuples of numbers",
        )
    return spec(name, fn, tuple(columns), MappingProxyType(options))


def _fits(value: object, default: Option) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(_fits(each, 0.0) for each in value)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def _all_of_shape(values: tuple[object, ...], shape: tuple[int, ...]) -> bool:
    return all(isinstance(value, Tensor) and value.shape == shape for value in values)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(_described(part) for part in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_described(part)}' for key, part in value.items())}}}"
    return type(value).__name__


def _nearest(name: str, names: Mapping[str, Any] | tuple[str, ...]) -> str | None:
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean '{close[0]}'?" if close else None


ADVANTAGES = Registry(AdvantageSpec)
POLICY_LOSSES = Registry(PolicyLossSpec)
KL_ESTIMATORS = Registry(KLSpec)

register_advantage = ADVANTAGES.register
advantage_estimator = ADVANTAGES.find
register_policy_loss = POLICY_LOSSES.register
policy_loss = POLICY_LOSSES.find
register_kl = KL_ESTIMATORS.register
kl_estimator = KL_ESTIMATORS.find
