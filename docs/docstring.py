"""Parse the docstrings of `tandem.algorithms` into their parts."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LABELS = ("When to use", "Watch", "Cost", "Source")
"""The labelled paragraphs that every algorithm must have."""

_SECTIONS = ("Args", "Returns", "Raises", "Attributes")
_START = re.compile(rf"({'|'.join([*LABELS, *_SECTIONS])}):(\s|$)|Equations?\b")
_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.+)")


@dataclass
class Docstring:
    """The parts of a docstring.

    Attributes:
        summary: the first paragraph, on one line.
        notes: further paragraphs without a label, in Markdown.
        equation: the indented lines below "Equation …:", or below the summary.
        symbols: the text in parentheses between "Equation" and the colon.
        labelled: the text of each label of LABELS that the docstring has, on one line.
        arguments: the meaning of each argument, on one line.
        returns, raises: the text of the section, on one line; empty without the section.
    """

    summary: str
    notes: list[str] = field(default_factory=list)
    equation: str = ""
    symbols: str = ""
    labelled: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    raises: str = ""


def parse(function: Callable[..., Any]) -> Docstring:
    """Parse the docstring of a function or class."""
    first, *blocks = _blocks(inspect.getdoc(function) or "")
    summary, _, code = first.partition("\n\n")
    found = Docstring(_one_line(summary), equation=textwrap.dedent(code))
    for block in blocks:
        label = block.split(":", 1)[0]
        if block.startswith("Equation"):
            title, _, code = block.partition(":\n")
            symbols = re.fullmatch(r"Equations?[^(]*\((.*)\)", _one_line(title))
            found.symbols = symbols[1] if symbols else ""
            found.equation = textwrap.dedent(code).strip("\n")
        elif label in LABELS:
            found.labelled[label] = _one_line(block.removeprefix(f"{label}:"))
        elif label == "Args":
            found.arguments = _entries(block)
        elif label == "Returns":
            found.returns = _one_line(block.removeprefix("Returns:"))
        elif label == "Raises":
            found.raises = _one_line(block.removeprefix("Raises:"))
        elif label != "Attributes":
            found.notes.append(_paragraph(block))
    return found


def _blocks(text: str) -> list[str]:
    """Split a docstring into paragraphs with the indented lines below them.

    A label starts a new paragraph, with or without a blank line before it.
    """
    blocks: list[list[str]] = [[]]
    blank = False
    for line in text.splitlines():
        begins = bool(line) and not line.startswith(" ") and (blank or _START.match(line) is not None)
        if begins and blocks[-1]:
            blocks.append([])
        blocks[-1].append(line)
        blank = not line
    return ["\n".join(block).strip("\n") for block in blocks]


def _entries(block: str) -> dict[str, str]:
    """Parse entries of the form `name, name: meaning`, each on one or several lines."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in textwrap.dedent(block.partition("\n")[2]).splitlines():
        entry = None if line.startswith(" ") else _ENTRY.match(line)
        if entry:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _paragraph(block: str) -> str:
    """Join the prose on one line and keep the indented lines below it unchanged."""
    prose, blank, code = block.partition("\n\n")
    return _one_line(prose) + blank + code
