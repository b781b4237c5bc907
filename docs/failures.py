"""Generate the page of messages: every error that the program can print, found in its source.

Each call that makes a `TandemError` is one entry, with its class, text, field, expected value and remedy. The
sign … replaces the parts that are only known at run time. The docstring of a class says when that class is
raised.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.entries import ROOT

PACKAGE = ROOT / "tandem"
_SHOWN = ("field", "expected", "remedy")


@dataclass(frozen=True)
class Message:
    """An error that the program can print.

    Attributes:
        kind: the class of the error.
        text: the message; … replaces the parts that are only known at run time.
        parts: `field`, `expected` and `remedy`, as far as the call gives them.
        file: the path from the root of the repository.
    """

    kind: str
    text: str
    parts: tuple[tuple[str, str], ...]
    file: str


@cache
def trees() -> Mapping[str, ast.Module]:
    """Return the syntax trees of the package's modules, by path from the root."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in files}


@cache
def kinds() -> Mapping[str, str]:
    """Return the classes of errors for users, each with the first paragraph of its docstring."""
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {"TandemError": "An error that belongs to none of the classes below."}
    while more := {
        node.name: _about(node)
        for node in classes
        if node.name not in found and any(_name(base) in found for base in node.bases)
    }:
        found |= more
    return found


def _about(node: ast.ClassDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


@cache
def messages() -> tuple[Message, ...]:
    """Return all messages, sorted by class and text."""
    found = {message for file, tree in trees().items() for message in _in(file, tree)}
    return tuple(sorted(found, key=lambda each: (each.kind, each.text, each.file, each.parts)))


def _short(tree: ast.Module) -> dict[str, str]:
    """Return the names by which a module raises errors: the classes and partials of them."""
    found = {kind: kind for kind in kinds()}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
            of = _name(node.value.args[0])
            if _name(node.value.func) == "partial" and of in found:
                found |= {_name(target): of for target in node.targets}
    return found


def _in(file: str, tree: ast.Module) -> Iterator[Message]:
    short = _short(tree)
    for function in ast.walk(tree):
        if isinstance(function, ast.Call) and _name(function.func) == "Check" and len(function.args) > 1:
            named = ((word.arg, words(word.value)) for word in function.keywords if word.arg in _SHOWN)
            parts = tuple((name, text) for name, text in named if name and text.strip("… "))
            yield Message("ConfigError", words(function.args[1]), parts, file)
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in _own(function):
            if isinstance(node, ast.Call) and (kind := short.get(_name(node.func), "")) and node.args:
                named = ((word.arg, words(word.value)) for word in node.keywords if word.arg in _SHOWN)
                parts = tuple((name, text) for name, text in named if name and text.strip("… "))
                for text in _texts(node.args[0], function, tree):
                    yield Message(kind, text, parts, file)


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions defined inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _own(child)


def _texts(node: ast.expr, function: ast.FunctionDef | ast.AsyncFunctionDef, tree: ast.Module) -> list[str]:
    """Return the texts that a message can have.

    The node is an expression, or a name. For a name the texts are what the function assigns to it. If the
    name is a parameter, they are the arguments of the function's calls in the same module.
    """
    if not isinstance(node, ast.Name):
        return [words(node)]
    assigned = [
        each.value
        for each in ast.walk(function)
        if isinstance(each, ast.Assign) and any(_name(target) == node.id for target in each.targets)
    ]
    parameters = [argument.arg for argument in function.args.args]
    if node.id in parameters:
        position = parameters.index(node.id) - (parameters[0] in ("self", "cls"))
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _name(call.func) == function.name and len(call.args) > position:
                assigned.append(call.args[position])
    return sorted({words(each) for each in assigned}) or ["…"]


def words(node: ast.expr) -> str:
    """Return the text of an expression, with … for the parts that are only known at run time."""
    match node:
        case ast.Constant(value=None):
            return ""
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(words(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return words(left) + words(right)
        case ast.IfExp(body=body, orelse=other):
            return " / ".join(part for part in (words(body), words(other)) if part)
        case ast.BoolOp(values=values):
            return " / ".join(part for part in map(words, values) if part.strip("…")) or "…"
    return "…"


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def page() -> str:
    """Return the page in Markdown."""
    by_kind: dict[str, list[Message]] = {}
    for message in messages():
        by_kind.setdefault(message.kind, []).append(message)
    parts = [
        "# Every message",
        f"The {len(messages())} errors that the program can print, collected from its source. The sign … "
        "replaces values that are only known at run time. A message names the key, file or argument, what "
        "was given, what was expected, and what to do. [What goes wrong](failures.md) explains the most "
        "frequent messages.",
    ]
    for kind, members in by_kind.items():
        parts += [f"## {kind}", f"{kinds()[kind].rstrip('.')}.", *_entries(members)]
    return "\n\n".join(parts) + "\n"


def _entries(members: Iterable[Message]) -> Iterator[str]:
    for message in members:
        shown = (
            escaped(message.text)
            if message.text.strip("… ")
            else "(the text of the error that caused this one)"
        )
        lines = [f"**{shown}** ([{Path(message.file).name}](../{message.file}))"]
        lines += [f"- {name}: {escaped(text)}" for name, text in message.parts]
        yield lines[0] + ("\n\n" + "\n".join(lines[1:]) if lines[1:] else "")


def escaped(text: str) -> str:
    """Put a text on one line and escape everything that has a meaning in Markdown."""
    one_line = " ".join(text.split())
    for mark in "\\`*_[]{}|#":
        one_line = one_line.replace(mark, f"\\{mark}")
    return one_line.replace("&", "&amp;").replace("<", "&lt;")
