"""Find the algorithms that have a page.

These are all registered functions, and every function or class whose docstring has "When to use".
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tandem.algorithms
from docs.docstring import Docstring, parse
from docs.kinds import BY_NAME, KINDS, OTHER, SETTINGS, Kind
from tandem.algorithms.registry import Registry, Spec

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "algorithms"

MODULES = (
    *(module.name for module in pkgutil.walk_packages(tandem.algorithms.__path__, "tandem.algorithms.")),
    "tandem.models.heads.exact",
)
"""The modules that contain algorithms."""


@dataclass(frozen=True)
class Entry:
    """An algorithm that has a page.

    Attributes:
        kind: the kind of algorithm.
        name: the name in the config, or the title of the page.
        aliases: other names that the config accepts.
        fn: the function or class.
        docstring: the parsed docstring.
        spec: the registered spec; None if the function is not registered.
        settings: the config keys that select the algorithm, with their values.
    """

    kind: Kind
    name: str
    aliases: tuple[str, ...]
    fn: Any
    docstring: Docstring
    spec: Spec | None
    settings: dict[str, Any]

    @property
    def path(self) -> str:
        """The path of the page below docs/algorithms."""
        return f"{self.kind.folder}/{self.name}.md"


def _contents() -> Iterator[Any]:
    """Yield all values in the modules, one module after the other."""
    for module in MODULES:
        yield from vars(importlib.import_module(module)).values()


def registries() -> list[Registry[Any]]:
    """Return the registries of the modules, in the order of KINDS."""
    found = {id(value): value for value in _contents() if isinstance(value, Registry)}
    return sorted(found.values(), key=lambda registry: list(KINDS).index(kind_of(registry)))


def described() -> list[Any]:
    """Return the unregistered functions and classes whose docstring has "When to use"."""
    named = {spec.fn for registry in registries() for spec in map(registry.find, registry.names)}
    own = (value for value in _contents() if callable(value) and getattr(value, "__module__", "") in MODULES)
    return [fn for fn in dict.fromkeys(own) if fn not in named and "When to use" in parse(fn).labelled]


def kind_of(registry: Registry[Any]) -> str:
    kind: str = registry.find(registry.names[0]).kind
    return kind


def entries() -> Iterator[Entry]:
    """Yield all algorithms that have a page, in the order of the index."""
    folders = [*(kind.folder for kind in KINDS.values()), OTHER.folder]
    yield from sorted([*_registered(), *_others()], key=lambda entry: folders.index(entry.kind.folder))


def _registered() -> Iterator[Entry]:
    for registry in registries():
        kind = KINDS[kind_of(registry)]
        for name in registry.names:
            spec: Spec = registry.find(name)
            aliases = tuple(sorted(alias for alias, of in registry.aliases.items() if of == name))
            settings = dict.fromkeys(kind.keys, name) | kind.beside | _beside(kind, name)
            yield Entry(kind, name, aliases, spec.fn, parse(spec.fn), spec, settings)


def _others() -> Iterator[Entry]:
    for fn in described():
        kind, name = BY_NAME.get(fn.__name__, (OTHER, fn.__name__))
        settings = dict.fromkeys(kind.keys, name) | kind.beside | _beside(kind, name)
        yield Entry(kind, name, (), fn, parse(fn), None, settings)


def _beside(kind: Kind, name: str) -> dict[str, Any]:
    return dict(SETTINGS.get(f"{kind.folder}/{name}", {}))
