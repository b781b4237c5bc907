"""The check of a loaded config: what keys declare, and the rules that cross sections. All that is wrong is
found at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.config.schema import Condition, Key, keys, value_at
from tandem.config.section import Finding, Section, WrongValueRead
from tandem.config.view import view_of
from tandem.errors import ConfigError

C = TypeVar("C", bound=Section)
Rule = Callable[[C], Iterator[Finding]]
"""A rule that crosses sections: given the whole config, it yields errors and notices."""


@dataclass(frozen=True)
class Findings:
    """What the rules found."""

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
    """What the declarations of the config's keys, and these rules, find.

    Args:
        config: the filled-in config.
        changed: the keys that differ from what they would be had nobody set them.
        bad: the keys whose value is a stand-in for a wrong one.
        lenient: whether a key that does nothing is worth a sentence alone, as in a command line that was
            written for another program.
        off: the keys that were given as false, their default: what they leave off is worth a sentence alone
            too.
    """
    run = _Check(config, changed, bad, lenient, off)
    found = [item for rule in rules for item in _until_wrong(rule, run.view)]
    found += run.needs()
    return Findings(
        [run.with_value(item) for item in found if isinstance(item, ConfigError)] + list(run.errors()),
        [item for item in found if isinstance(item, str)] + list(run.notices()),
    )


def _until_wrong(rule: Callable[..., Iterator[Finding]], *given: Any) -> Iterator[Finding]:
    """Yield what a rule finds before it reads a wrong value: only what comes after could be mistaken."""
    try:
        yield from rule(*given)
    except WrongValueRead:
        return


@dataclass
class _Check:
    """The declarations of one config's keys; see `check`."""

    config: Section
    changed: frozenset[str]
    bad: frozenset[str]
    lenient: bool
    off: frozenset[str]

    def __post_init__(self) -> None:
        self.keys = keys(type(self.config))
        self.view = view_of(self.config, self.changed, self.bad)

    def needs(self) -> list[Finding]:
        """What the needs of keys find, where these count."""
        found: list[Finding] = []
        for item in self.keys.values():
            if item.needs and self._asked(item):
                at, _, leaf = item.name.rpartition(".")
                own = value_at(self.view, at) if at else self.view
                asked = [each for need in item.needs for each in _until_wrong(need, own, leaf)]
                for error in asked:
                    if isinstance(error, ConfigError) and error.field is None:
                        error.field = item.name
                found += asked
        return found

    def with_value(self, error: ConfigError) -> ConfigError:
        """The error with the value of its key, unless it says itself what was given; of nothing, nothing."""
        field = error.field or ""
        if error.got is None and field in self.keys:
            value = value_at(self.config, field)
            if value not in (None, "", ()):
                error.got = str(value).lower() if isinstance(value, bool) else value
        return error

    def errors(self) -> Iterator[ConfigError]:
        """An error for each key that does nothing although it says what should come out."""
        for name, condition in self._unused(notice=False):
            yield ConfigError(
                "has no effect",
                field=name,
                got=value_at(self.view, name),
                expected=f"set only {condition.words}",
                remedy="set that too, or remove this key",
            )

    def notices(self) -> Iterator[str]:
        """A sentence for each reason why keys do nothing."""
        reasons: dict[str, list[str]] = {}
        for name, condition in self._unused(notice=True):
            reasons.setdefault(condition.words, []).append(name)
        for words, names in reasons.items():
            yield f"{', '.join(names)}: no effect; counts only {words}."

    def _unused(self, *, notice: bool) -> Iterator[tuple[str, Condition]]:
        """The changed keys that do nothing, in alphabetical order, each with its outermost reason."""
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
        """Whether it holds; None: that depends on a wrong value."""
        own = value_at(self.view, condition.at.removesuffix(".")) if condition.at else self.view
        try:
            return condition.when.applies(own)
        except WrongValueRead:
            return None

    def _counts(self, item: Key) -> bool:
        return all(self._holds(condition) for condition in item.conditions)

    def _asked(self, item: Key) -> bool:
        """Whether what it needs is looked at here: an inherited value is at its source, if that counts."""
        if not self._counts(item):
            return False
        inherits = None if item.name in self.changed else item.inherits
        return inherits is None or not self._counts(self.keys[inherits])
