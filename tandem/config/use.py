"""When a key counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tandem.config.schema import value_at
from tandem.config.section import Section

C = TypeVar("C", bound=Section)


@dataclass(frozen=True)
class Use(Generic[C]):
    """When some keys count.

    Attributes:
        keys: dotted paths; one that ends in a dot stands for everything below it.
        reads: the keys that `applies` looks at.
        applies: whether the keys count.
        condition: the same in words: "counts only <condition>".
        neutral: values that ask for nothing, so that they may stand where the key does not count.
    """

    keys: tuple[str, ...]
    reads: tuple[str, ...]
    applies: Callable[[C], bool]
    condition: str
    neutral: tuple[Any, ...] = ()

    def unused(self, config: C, changed: frozenset[str], bad: frozenset[str]) -> list[str]:
        """The changed keys that do nothing, in alphabetical order."""
        if bad.intersection(self.reads) or self.applies(config):
            return []
        prefixes = tuple(key for key in self.keys if key.endswith("."))
        mine = (key for key in changed - bad if key in self.keys or (prefixes and key.startswith(prefixes)))
        return sorted(key for key in mine if value_at(config, key) not in self.neutral)
