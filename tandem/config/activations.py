"""The rules of a model's keys for activation memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.config.rule import Rule
from tandem.config.schema import value_at
from tandem.config.section import Section, nearest_remedy
from tandem.config.unused import unused_errors
from tandem.config.use import Use
from tandem.errors import ConfigError

_GROUPS = ("matmul", "attention")
_NAMES = (
    "enable_gradient_checkpointing",
    "gradient_checkpointing_mode",
    "gradient_checkpointing_layers",
    "gradient_checkpointing_ops",
    "enable_activation_offload",
    "activation_offload_mode",
)


def activation_rules(at: str) -> list[Rule[Any]]:
    """For the model section at path `at`, whose model is trained."""
    switch, mode, layers, ops, offload, copies = (f"{at}.{name}" for name in _NAMES)
    uses: list[Use[Any]] = [
        Use((mode,), (switch,), lambda config: bool(value_at(config, switch)), f"with {switch}=true"),
        Use(
            (layers,),
            (mode,),
            lambda config: value_at(config, mode) in ("first", "every"),
            f"with {mode}=first or every",
        ),
        Use((ops,), (mode,), lambda config: value_at(config, mode) == "ops", f"with {mode}=ops"),
        Use((copies,), (offload,), lambda config: bool(value_at(config, offload)), f"with {offload}=true"),
    ]

    def unused(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        return unused_errors(uses, config, changed, frozenset())

    return [
        Rule((switch, mode, layers, ops, offload, copies), unused),
        Rule((mode, layers), _layers(mode, layers)),
        Rule((mode, ops), _ops(mode, ops)),
    ]


def no_activations(at: str) -> Rule[Any]:
    """For the model section at path `at`, whose model only computes."""
    names = tuple(f"{at}.{name}" for name in _NAMES[1:])
    use: Use[Any] = Use(names, (), lambda config: False, "for a model that is trained")
    return Rule(names, lambda config, changed: unused_errors([use], config, changed, frozenset()))


def _layers(mode: str, layers: str) -> Any:
    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        chosen, count = value_at(config, mode), value_at(config, layers)
        if chosen in ("first", "every") and count is None:
            yield ConfigError(
                "missing",
                field=layers,
                expected="the number of layers"
                if chosen == "first"
                else "one layer in how many is computed again",
                remedy=f"set {layers}, or {mode}=full",
            )
        elif chosen == "every" and count == 1:
            yield ConfigError(
                "one layer in one is every layer",
                field=layers,
                got=count,
                expected=">= 2",
                remedy=f"set {mode}=full and remove this key",
            )

    return check


def _ops(mode: str, ops: str) -> Any:
    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        names = value_at(config, ops)
        if value_at(config, mode) != "ops":
            return
        if not names:
            yield ConfigError(
                "no operator's output is kept",
                field=ops,
                got="nothing",
                expected="at least one operator",
                remedy=f"set {mode}=full and remove this key",
            )
        for name in names:
            if name not in _GROUPS and not all(name.partition(".")):
                yield ConfigError(
                    "unknown operator",
                    field=ops,
                    got=name,
                    expected=f"{', '.join(_GROUPS)}, or namespace.operator such as aten.mm",
                    remedy=nearest_remedy(name, _GROUPS),
                )

    return check
