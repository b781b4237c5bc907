"""Registries of advantage estimators, policy losses and KL estimators.

The signature of a function declares its inputs. Positional parameters are columns of the batch. Keyword-only
parameters are options (numbers, bools, strings, tuples of numbers) with defaults:

    @register_advantage("mean_baseline")
    def mean_baseline(token_level_rewards, response_mask, offsets, *, scale=1.0): ...

The training loop reads the signature and passes the columns and options in it. `known_columns` of each spec
class lists the shape and the meaning of every column. A user-defined function needs no registration. Its name
in the config is `path/to/file.py:function` or `package.module:function`.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
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
    """The result of an estimator; both tensors are (N), and 0 where `response_mask` is false.

    Attributes:
        advantages: weights of the policy gradient.
        returns: the value targets for training a critic.
    """

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class Spec:
    """A registered function and the inputs that it needs.

    Attributes:
        name: the registered name, or a user's reference.
        fn: the function.
        columns: names of the function's positional parameters, in order.
        options: a dict from keyword-only parameter to its default.
    """

    kind: ClassVar[str]
    known_columns: ClassVar[Mapping[str, str]]
    result: ClassVar[str]

    name: str
    fn: Callable[..., Any]
    columns: tuple[str, ...]
    options: Mapping[str, Option]

    def select_options(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Option]:
        """Return the options to call the function with.

        Args:
            shared: values of config keys that many algorithms read; undeclared options are ignored.
            own: options for this function only, which override `shared`.

        Raises:
            ConfigError: an option in `own` is not declared, or a value has the wrong type.
        """
        chosen = {name: shared[name] for name in self.options if name in shared} | dict(own)
        for name, value in chosen.items():
            if name not in self.options:
                raise ConfigError(
                    f"the {self.kind} '{self.name}' has no option of this name",
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
        """Check that a result is a tensor with the shape of `like`, and return it."""
        if not (_all_of_shape((result,), like.shape) and fits(result)):
            raise self._wrong_result(result, f"{expected} of shape {tuple(like.shape)}")
        tensor: Tensor = result
        return tensor

    def _wrong_result(self, got: object, expected: str) -> ConfigError:
        return ConfigError(
            f"the {self.kind} must return {self.result}",
            field=self.name,
            got=_described(got),
            expected=expected,
        )


class AdvantageSpec(Spec):
    """The spec of an advantage estimator."""

    kind = "advantage estimator"
    known_columns: ClassVar[Mapping[str, str]] = {
        "token_level_scores": "(N) fp32, rewards before the KL penalty",
        "token_level_rewards": "(N) fp32, rewards after the KL penalty, if there is one",
        "values": "(N) fp32, the critic's value before each token",
        "response_mask": "(N) bool, true at tokens that the policy wrote",
        "old_log_probs": "(N) fp32, nats, of the policy before this batch's updates",
        "ref_log_probs": "(N) fp32, nats, of the reference",
        "rollout_log_probs": "(N) fp32, nats, of the engine that sampled",
        "rollout_is_weights": "(N) fp32, importance weights of the rollout correction; 1 without it",
        "sum_pi_squared": "(N) fp32, sum over the vocabulary of pi(v)**2 at the token's position",
        "reward_baselines": "(B) fp32, total reward of the prompt's greedy response",
        "reward_components": "(B, K) fp32, each sequence's rewards by component",
        "group": "(B) int64, index of the prompt that each sequence answers",
        "offsets": "(B+1) int64, index of each sequence's first token",
    }
    result = "Advantages(advantages, returns)"

    @property
    def needs_critic(self) -> bool:
        return "values" in self.columns

    def __call__(self, columns: Mapping[str, Tensor], **options: Option) -> Advantages:
        """Call the function with the columns that its signature names.

        Raises:
            ConfigError: the result is not two tensors of shape (N).
        """
        result = self._call(columns, options)
        shape = columns["response_mask"].shape
        if not (isinstance(result, tuple) and len(result) == 2 and _all_of_shape(result, shape)):
            raise self._wrong_result(result, f"two tensors of shape {tuple(shape)}")
        return Advantages(*result)


class Selection(Spec):
    """The spec of a token selection, made over a whole batch before its updates.

    See `tandem.algorithms.selection`.
    """

    kind = "token selection"
    known_columns: ClassVar[Mapping[str, str]] = {
        "old_log_probs": "(N) fp32, nats, of the policy before this batch's updates",
        "advantages": "(N) fp32",
        "response_mask": "(N) bool, true at tokens that the policy wrote",
        "offsets": "(B+1) int64, index of each sequence's first token",
    }
    result = "(N) bool"

    def __call__(self, columns: Mapping[str, Tensor], options: Mapping[str, Option]) -> Tensor:
        """Call the function with the columns and the options that its signature names.

        Raises:
            ConfigError: the result is not a bool tensor of shape (N).
        """
        chosen = self._call(columns, {name: options[name] for name in self.options if name in options})
        mask = columns["response_mask"]
        return self._tensor(chosen, mask, "a bool tensor", lambda each: each.dtype == mask.dtype)


SELECTIONS: dict[Callable[..., Any], Selection] = {}
"""A dict from loss function to its token selection, if the loss has a token selection."""


class PolicyLossSpec(Spec):
    """The spec of a policy loss."""

    kind = "policy loss"
    known_columns: ClassVar[Mapping[str, str]] = {
        "log_probs": "(N) fp32, nats, of the policy being trained; carries the gradient",
        "old_log_probs": "(N) fp32, nats, of the policy before this batch's updates",
        "advantages": "(N) fp32",
        "response_mask": "(N) bool, true at tokens that the policy wrote",
        "offsets": "(B+1) int64, index of each sequence's first token",
        "entropy": "(N) fp32, nats; carries the gradient",
        "rollout_log_probs": "(N) fp32, nats, of the engine that sampled",
        "rollout_is_weights": "(N) bounded importance weights of the rollout correction; 1 without it; "
        "if the function does not take them, its losses are multiplied by them",
        "selected_tokens": "(N) bool, selected over the whole batch, see `selects_tokens`",
    }
    result = "(losses per token, {metric: per token})"

    @property
    def selection(self) -> Selection | None:
        """The `Selection` that computes `selected_tokens`; None if the loss does not use it.

        The options of the selection are also options of the loss.
        """
        return SELECTIONS.get(self.fn)

    def __call__(self, columns: Mapping[str, Tensor], **options: Option) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the function with the columns that its signature names.

        Raises:
            ConfigError: the result is not a tensor (N) of losses and a dict of tensors (N).
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
    """The spec of an estimator of KL(policy || reference) from the sampled tokens."""

    kind = "KL estimator"
    known_columns: ClassVar[Mapping[str, str]] = {
        "log_probs": "(N) fp32, nats, of the policy; may carry the gradient",
        "ref_log_probs": "(N) fp32, nats, of the reference",
    }
    result = "an estimate per token"

    def __call__(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Call the function with the columns that its signature names.

        Raises:
            ConfigError: the result is not a tensor of shape (N).
        """
        return self._tensor(self._call(columns, {}), columns["log_probs"])


AnySpec = TypeVar("AnySpec", bound=Spec)


class Registry(Generic[AnySpec]):
    """A registry of specs, keyed by name and alias.

    Args:
        spec: the class of the specs; it defines which columns are known.
    """

    def __init__(self, spec: type[AnySpec]) -> None:
        self._spec = spec
        self._specs: dict[str, AnySpec] = {}
        self.aliases: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names, without aliases."""
        return tuple(sorted(self._specs))

    def register(self, name: str, *aliases: str) -> Callable[[Function], Function]:
        """Return a decorator that registers a function and returns it unchanged.

        Raises:
            ConfigError: another function has this name, or the signature is not a valid declaration.
        """

        def decorate(fn: Function) -> Function:
            for each in (name, *aliases):
                known = self._specs.get(self.aliases.get(each, each))
                if known is not None and known.fn is not fn:
                    raise ConfigError(f"another {self._spec.kind} already has this name", field=each)
            self._specs[name] = declared(self._spec, name, fn)
            self.aliases.update(dict.fromkeys(aliases, name))
            return fn

        return decorate

    def find(self, name: str) -> AnySpec:
        """Return the spec of a registered name, an alias, or a user's `file.py:function`.

        Raises:
            ConfigError: the name is unknown, or the user's function cannot be used.
        """
        if ":" in name:
            fn = load_function(name)
            known = (spec for spec in self._specs.values() if spec.fn is fn)
            return next(known, None) or declared(self._spec, name, fn)
        spec = self._specs.get(self.aliases.get(name, name))
        if spec is None:
            raise ConfigError(
                f"unknown {self._spec.kind}",
                field=name,
                expected=", ".join(self.names),
                remedy=_nearest(name, (*self.names, *self.aliases))
                or "to use your own function, write path/to/file.py:function",
            )
        return spec


def declared(spec: type[AnySpec], name: str, fn: Callable[..., Any]) -> AnySpec:
    """Build the spec of a function from its signature.

    Raises:
        ConfigError: the signature is not a valid declaration; the message shows a valid one.
    """
    columns: list[str] = []
    options: dict[str, Option] = {}
    faults: list[str] = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            if not isinstance(parameter.default, bool | int | float | str | tuple):
                faults.append(
                    f"the default of option '{parameter.name}' must be a number, bool, string or tuple"
                )
            options[parameter.name] = parameter.default
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            faults.append(f"'{parameter}' is not allowed, because every parameter needs a name")
        elif parameter.name not in spec.known_columns:
            hint = _nearest(parameter.name, spec.known_columns) or "options must come after *"
            faults.append(f"'{parameter.name}' is not a column ({hint})")
        else:
            columns.append(parameter.name)
    if spec is PolicyLossSpec:
        selection = SELECTIONS.get(fn)
        if ("selected_tokens" in columns) != (selection is not None):
            faults.append("'selected_tokens' and the decorator @selects_tokens(FUNCTION) need each other")
        if selection is not None:  # the options of the selection are options of the loss too
            twice = [name for name in selection.options if name in options]
            faults += [f"{selection.name} already has an option '{name}'" for name in twice]
            options.update(selection.options)
    if faults:
        known = "".join(f"\n      {column}: {meaning}" for column, meaning in spec.known_columns.items())
        raise ConfigError(
            f"the signature of this {spec.kind} is not valid: {'; '.join(faults)}",
            field=name,
            got=f"def {getattr(fn, '__name__', 'function')}{inspect.signature(fn)}",
            expected=f"def function(COLUMN, ..., *, OPTION=DEFAULT, ...) -> {spec.result}\n"
            f"    COLUMN is any of{known}\n"
            "    DEFAULT is a number, bool, string or tuple of numbers",
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
