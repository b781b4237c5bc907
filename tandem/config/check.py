"""The check of a loaded config: the declarations of its keys, and rules about several sections.

One pass finds all problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.config.schema import Condition, Key, keys, value_at
from tandem.config.section import Finding, InvalidValueRead, Section
from tandem.config.view import view_of
from tandem.errors import ConfigError

C = TypeVar("C", bound=Section)
Rule = Callable[[C], Iterator[Finding]]
"""A function that checks a rule about several sections of a config, and yields errors and notices."""


@dataclass(frozen=True)
class Findings:
    """The errors and notices that the rules found."""

    errors: list[ConfigError]
    notices: list[str]


def check(
    config: Section,
    changed: frozenset[str],
    bad: frozenset[str],
    rules: Iterable[Rule[Any]],
    *,
    lenient: bool = False,
    off: frozenset[str] = frozenset(),
) -> Findings:
    """Check the declarations of all keys and the given rules.

    Args:
        config: the config, with all defaults filled in.
        changed: the keys whose values differ from the default or inherited value.
        bad: the keys whose invalid values were replaced by defaults.
        rules: the rules that cross sections.
        lenient: whether a key without effect gives only a notice, as for a command line that was written for
            another program.
        off: the keys that the user explicitly set to false, which is also their default. If such a key turns
            off another key, a value of the other key gives only a notice.

    Returns:
        all errors and notices.
    """
    run = _Check(config, changed, bad, lenient, off)
    found = [item for rule in rules for item in _until_invalid(rule, run.view)]
    found += run.needs()
    return Findings(
        [run.with_value(item) for item in found if isinstance(item, ConfigError)] + list(run.errors()),
        [item for item in found if isinstance(item, str)] + list(run.notices()),
    )


def _until_invalid(rule: Callable[..., Iterator[Finding]], *given: Any) -> Iterator[Finding]:
    """Yield a rule's findings until the rule reads an invalid value. Later findings may be wrong."""
    try:
        yield from rule(*given)
    except InvalidValueRead:
        return


@dataclass
class _Check:
    """The check of one config's keys; see `check`."""

    config: Section
    changed: frozenset[str]
    bad: frozenset[str]
    lenient: bool
    off: frozenset[str]

    def __post_init__(self) -> None:
        self.keys = keys(type(self.config))
        self.view = view_of(self.config, self.changed, self.bad)

    def needs(self) -> list[Finding]:
        """Return the errors and notices from the `needs` rules of all used keys."""
        found: list[Finding] = []
        for item in self.keys.values():
            if item.needs and self._asked(item):
                at, _, leaf = item.name.rpartition(".")
                own = value_at(self.view, at) if at else self.view
                asked = [each for need in item.needs for each in _until_invalid(need, own, leaf)]
                for error in asked:
                    if isinstance(error, ConfigError) and error.field is None:
                        error.field = item.name
                found += asked
        return found

    def with_value(self, error: ConfigError) -> ConfigError:
        """Return the error with the key's value as `got`, if `got` is missing and the value is not empty."""
        field = error.field or ""
        if error.got is None and field in self.keys:
            value = value_at(self.config, field)
            if value not in (None, "", ()):
                error.got = str(value).lower() if isinstance(value, bool) else value
        return error

    def errors(self) -> Iterator[ConfigError]:
        """Yield an error for each key that has no effect although it should change the result."""
        for name, condition in self._unused(notice=False):
            yield ConfigError(
                "has no effect",
                field=name,
                got=value_at(self.view, name),
                expected=f"set only {condition.words}",
                remedy="meet that condition, or remove this key",
            )

    def notices(self) -> Iterator[str]:
        """Yield one sentence for each reason why keys have no effect."""
        reasons: dict[str, list[str]] = {}
        for name, condition in self._unused(notice=True):
            reasons.setdefault(condition.words, []).append(name)
        for words, names in reasons.items():
            yield f"{', '.join(names)}: no effect; used only {words}."

    def _unused(self, *, notice: bool) -> Iterator[tuple[str, Condition]]:
        """Yield (key, outermost condition that fails) for each changed key without effect, sorted by name."""
        for name in sorted(self.changed - self.bad):
            conditions = self.keys[name].conditions
            reasons = (item for item in conditions if self._is_notice(item) == notice)
            value = value_at(self.view, name)
            failed = (
                item for item in reasons if value not in item.when.neutral and self._holds(item) is False
            )
            first = next(failed, None)
            if first is not None:
                yield name, first

    def _is_notice(self, condition: Condition) -> bool:
        when = condition.when
        return when.notice or self.lenient or f"{condition.at}{when.switch}" in self.off

    def _holds(self, condition: Condition) -> bool | None:
        """Return whether the condition is true; None if this depends on an invalid value."""
        own = value_at(self.view, condition.at.removesuffix(".")) if condition.at else self.view
        try:
            return condition.when.applies(own)
        except InvalidValueRead:
            return None

    def _counts(self, item: Key) -> bool:
        return all(self._holds(condition) for condition in item.conditions)

    def _asked(self, item: Key) -> bool:
        """Return whether the needs of a key are checked here.

        An inherited value is checked at the key that it comes from, if that key is used.
        """
        if not self._counts(item):
            return False
        inherits = None if item.name in self.changed else item.inherits
        return inherits is None or not self._counts(self.keys[inherits])
