"""A parser for lists and mappings as Hydra writes them on a command line, `[a,b]` and `{a:1,b:[x,y]}`.

The syntax is almost YAML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

_PRIMITIVE = re.compile(r"(?:\\.|\$\{[^{}]*\}|[^\s\\,:=()\[\]{}'\"]|[:/=](?!\s)|[ \t]+(?=[^\s,\]}]))+")
_KEY = re.compile(r"[\w.$%*@?|/+-]+")
_INTEGER = re.compile(r"[+-]?(0|[1-9](_?\d)*)")
_FLOAT = re.compile(
    r"[+-]?(\d(_?\d)*\.(\d(_?\d)*)?|\.\d(_?\d)*|\d(_?\d)*)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.I
)
_WORDS = {"null": None, "true": True, "false": False}


def read_flow(text: str) -> Any:
    """Parse a text that is a list or a mapping, and return the value.

    Raises:
        ValueError: the text is not a list or mapping, or has a syntax error.
    """
    reader = _Reader(text)
    try:
        value = reader.value() if text[:1] in ("[", "{") else reader.fail()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    reader.blanks()
    if reader.at != len(text):
        reader.fail()
    return value


class _Reader:
    """The parser's text and its position in the text."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def fail(self) -> Any:
        raise ValueError(f"not a value at character {self.at}")

    def blanks(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def took(self, mark: str) -> bool:
        self.blanks()
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) * found
        return found

    def expect(self, mark: str) -> None:
        if not self.took(mark):
            self.fail()

    def value(self) -> Any:
        if self.took("["):
            return list(self.listed("]", self.value))
        if self.took("{"):
            return dict(self.listed("}", self.pair))
        return self.typed(_PRIMITIVE)

    def listed(self, end: str, read: Callable[[], Any]) -> Iterator[Any]:
        """Yield the comma-separated items up to a closing bracket."""
        if self.took(end):
            return
        while True:
            yield read()
            if self.took(end):
                return
            self.expect(",")

    def pair(self) -> tuple[Any, Any]:
        name = self.typed(_KEY)
        self.expect(":")
        return name, self.value()

    def typed(self, form: re.Pattern[str]) -> Any:
        """Return a quoted text, or the value of an unquoted text that matches `form`."""
        for quote in ("'", '"'):
            if self.took(quote):
                return self.quoted(quote)
        found = form.match(self.text, self.at)
        if found is None:
            return self.fail()
        self.at = found.end()
        return _typed(found.group().rstrip())

    def quoted(self, quote: str) -> str:
        """Return the text up to its closing quote. Backslashes are kept, except before a quote."""
        end = self.at
        while self.text[end : end + 1] != quote:
            if end >= len(self.text):
                return str(self.fail())
            end += 2 if self.text[end : end + 2] == f"\\{quote}" else 1
        inner, self.at = self.text[self.at : end], end + 1
        return inner.replace(f"\\{quote}", quote)


def _typed(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return re.sub(r"\\(.)", r"\1", text)
