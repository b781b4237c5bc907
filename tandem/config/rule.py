"""What a rule over several keys is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.config.section import Section
from tandem.errors import ConfigError

C = TypeVar("C", bound=Section)


@dataclass(frozen=True)
class Rule(Generic[C]):
    """A rule over several keys.

    Attributes:
        reads: the keys it looks at; with a wrong value in one of them it stays silent.
        check: yields errors, and notices as plain sentences.
    """

    reads: tuple[str, ...]
    check: Callable[[C, frozenset[str]], Iterable[ConfigError | str]]
