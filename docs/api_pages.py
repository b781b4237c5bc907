"""Generate the site's pages about the Python interface, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from docs.entries import ROOT

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):\s*(.*)$")
_ENTRY = re.compile(r"^(\*{0,2}\w[\w, *]*): (.*)$")


@dataclass(frozen=True)
class Part:
    """One page of the Python interface.

    Attributes:
        title: the heading of the page.
        purpose: one sentence that says what the modules are for.
        modules: the modules whose public names the page lists: all of `__all__`, or without `__all__` the
            public classes and functions that the module itself defines.
    """

    title: str
    purpose: str
    modules: tuple[str, ...]


PARTS = {
    "tandem": Part("tandem", "Train, generate and score from a script or a notebook.", ("tandem",)),
    "rewards": Part(
        "tandem.rewards",
        "The arguments and results of a reward function, ready-made scorers, and a model as judge.",
        tuple(f"tandem.rewards.{name}" for name in ("base", "items", "signatures", "rules", "judges")),
    ),
    "sandbox": Part("tandem.sandbox", "Run untrusted programs within limits.", ("tandem.sandbox",)),
    "protocol": Part("tandem.protocol", "The data that travels between workers.", ("tandem.protocol",)),
    "runtime": Part(
        "tandem.runtime",
        "Workers, worker groups, dispatch and futures, to write a distributed program of your own.",
        ("tandem.runtime", "tandem.runtime.ray_backend"),
    ),
    "engines": Part(
        "tandem.engines",
        "The two protocols that an engine can implement: training and rollout.",
        ("tandem.engines.train.base", "tandem.engines.rollout.base", "tandem.engines.rollout.registry"),
    ),
    "algorithms": Part(
        "tandem.algorithms",
        "The registries of algorithms and their shared functions. Each algorithm has its own page.",
        ("tandem.algorithms.registry", "tandem.algorithms.aggregation", "tandem.algorithms.evaluation"),
    ),
    "errors": Part("tandem.errors", "The classes of errors that Tandem raises.", ("tandem.errors",)),
    "observability": Part(
        "tandem.observability", "Read a run folder from a program.", ("tandem.observability.reading",)
    ),
}


def pages() -> dict[str, str]:
    """Return the Markdown of every page by its path below api/."""
    rows = "\n".join(f"- [{part.title}]({name}.md): {part.purpose}" for name, part in PARTS.items())
    index = (
        "# Python\n\nThe public names, with their signatures and docstrings. Most users need only `tandem`; "
        f"the other modules are for people who extend it.\n\n{rows}\n"
    )
    return {"index.md": index} | {f"{name}.md": _page(part) for name, part in PARTS.items()}


def public(part: Part) -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions of a page with their names, each object once."""
    seen: set[int] = set()
    for path in part.modules:
        module = import_module(path)
        for name in getattr(module, "__all__", None) or _own(module):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in seen:
                seen.add(id(value))
                yield name, value


def _own(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _page(part: Part) -> str:
    described = "\n\n".join(_described(name, value) for name, value in public(part))
    return f"# {part.title}\n\n{part.purpose}\n\n{described}\n"


def _described(name: str, value: Any) -> str:
    file = Path(inspect.getsourcefile(inspect.unwrap(value)) or "").resolve().relative_to(ROOT).as_posix()
    parts = [f"## `{name}`", f"```python\n{_signature(name, value)}\n```", documented(value)]
    parts.append(f"Code: [{file}](../../{file})")
    if inspect.isclass(value):
        parts += [text for member in _members(value) if (text := _member(*member))]
    return "\n\n".join(part for part in parts if part)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class itself defines."""
    for name, value in vars(kind).items():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(inner) and inspect.getdoc(inner):
            yield name, value if isinstance(value, property) else inner


def _member(name: str, value: Any) -> str:
    if isinstance(value, property):
        return f"### `{name}`\n\n{documented(value.fget)}"
    return f"### `{name}`\n\n```python\n{_signature(name, value)}\n```\n\n{documented(value)}"


def _signature(name: str, value: Any) -> str:
    """Return the signature with annotations. A long signature has one parameter per line."""
    word = "class " if inspect.isclass(value) else "def "
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{word}{name}"
    text = re.sub(r" at 0x[0-9a-f]+|<factory>", "…", f"{word}{name}{signature}".replace("'", ""))
    if len(text) <= 100:
        return text
    shown = ",\n    ".join(_parameters(signature))
    returns = text.rpartition(")")[2]
    return f"{word}{name}(\n    {shown},\n){returns}"


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    """Yield each parameter as in the source, with a bare * before the keyword-only parameters."""
    starred = False
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not starred:
            yield "*"
        starred = starred or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        yield re.sub(r" at 0x[0-9a-f]+|<factory>", "…", str(each).replace("'", ""))


def documented(value: Any) -> str:
    """Convert a docstring to Markdown: paragraphs, indented code, and sections as lists."""
    own = value.__doc__ if value.__doc__ and not value.__doc__.startswith(f"{value.__name__}(") else None
    out: list[str] = []
    in_section = False
    for line in inspect.cleandoc(own or "").splitlines():
        if section := _SECTION.match(line):
            in_section = True
            out += ["", f"**{section[1]}**" + (f": {_plain(section[2])}" if section[2] else ""), ""]
        elif in_section and (entry := _ENTRY.match(line.strip())) and line[:5].strip():
            out.append(f"- `{entry[1]}`: {_plain(entry[2])}")
        elif in_section and line.startswith(" "):
            out.append(f"    {_plain(line.strip())}")
        else:
            in_section = in_section and not line
            out.append(line if line.startswith("    ") else _plain(line))
    return "\n".join(out).strip()


def _plain(text: str) -> str:
    """Escape what Markdown would read as a tag, a link or emphasis, outside of code."""
    parts = text.split("`")
    return "`".join(
        part if place % 2 else part.replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*")
        for place, part in enumerate(parts)
    )
