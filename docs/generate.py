"""Writes docs/algorithms/: a page for each algorithm and an index, from docstrings and signatures.

    make docs            (python -m docs.generate)

An algorithm that is registered has a page; nothing is to be added here for it.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import tandem.algorithms
from docs.docstring import Docstring, parse
from docs.kinds import KINDS, NEEDS, OTHER, SETTINGS, Kind
from docs.probe import level
from tandem.algorithms.registry import Registry, Spec
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, nested

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "algorithms"

_PAPER = re.compile(r"([^;]*?\d{4}\b(?: \([^)]*\))?)[^;]*?(https?://[^\s,;]+[^\s,;.])")


@dataclass(frozen=True)
class Entry:
    """What a page is about.

    Attributes:
        kind: what it is.
        name: in the config, or its title.
        aliases: further names.
        fn: the function.
        said: its docstring.
        spec: of a registered function.
        settings: the keys that ask for it.
    """

    kind: Kind
    name: str
    aliases: tuple[str, ...]
    fn: Any
    said: Docstring
    spec: Spec | None
    settings: dict[str, Any]

    @property
    def path(self) -> str:
        """Of its page, below docs/algorithms."""
        return f"{self.kind.folder}/{self.name}.md"


def _contents() -> Iterator[Any]:
    """What the modules of `tandem.algorithms` hold, module by module."""
    for module in pkgutil.walk_packages(tandem.algorithms.__path__, "tandem.algorithms."):
        yield from vars(importlib.import_module(module.name)).values()


def registries() -> list[Registry[Any]]:
    """All that there are, in the order of KINDS."""
    found = {id(value): value for value in _contents() if isinstance(value, Registry)}
    return sorted(found.values(), key=lambda registry: list(KINDS).index(kind_of(registry)))


def described() -> list[Any]:
    """The functions and classes outside the registries that say when to use them."""
    named = {spec.fn for registry in registries() for spec in map(registry.find, registry.names)}
    own = (
        value
        for value in _contents()
        if callable(value) and getattr(value, "__module__", "").startswith("tandem.algorithms.")
    )
    return [fn for fn in dict.fromkeys(own) if fn not in named and "When to use" in parse(fn).labelled]


def kind_of(registry: Registry[Any]) -> str:
    kind: str = registry.find(registry.names[0]).kind
    return kind


def entries() -> Iterator[Entry]:
    """Everything that has a page, in the order of the index."""
    for registry in registries():
        kind = KINDS[kind_of(registry)]
        for name in registry.names:
            spec: Spec = registry.find(name)
            aliases = tuple(sorted(alias for alias, of in registry.aliases.items() if of == name))
            settings = dict.fromkeys(kind.keys, name) | kind.beside | _beside(kind, name)
            yield Entry(kind, name, aliases, spec.fn, parse(spec.fn), spec, settings)
    for fn in described():
        yield Entry(OTHER, fn.__name__, (), fn, parse(fn), None, _beside(OTHER, fn.__name__))


def _beside(kind: Kind, name: str) -> dict[str, Any]:
    return dict(SETTINGS.get(f"{kind.folder}/{name}", {}))


def option_key(kind: Kind, option: str) -> str:
    """Where an option is set: at a key of its own, or among those given by name."""
    own = (f"{section}.{option}" for section in kind.sections)
    return next((name for name in own if name in keys(TrainConfig)), f"{kind.by_name}.{option}")


def default_of(name: str, declared: Any) -> Any:
    """What a run takes that sets no option: the key's default, else what the signature declares."""
    key = keys(TrainConfig).get(name)
    while key is not None and key.inherits is not None:
        key = keys(TrainConfig)[key.inherits]
    return declared if key is None or key.default is None else key.default


def page(entry: Entry) -> str:
    """A page, in Markdown."""
    said, labelled = entry.said, entry.said.labelled
    parts = [f"# `{entry.name}`", _sentence(said.summary)]
    also = f"; also called {_ticked(entry.aliases)}" if entry.aliases else ""
    parts.append(_sentence(f"{entry.kind.singular}{also}. Code: {_source_link(entry)}"))
    if "When to use" in labelled:
        parts += ["## When to use", _sentence(labelled["When to use"])]
    if said.equation:
        parts += ["## Equation", f"```text\n{said.equation}\n```"]
        parts += [f"Where: {said.symbols}."] if said.symbols else []
    parts += said.notes
    config = list(_config(entry))
    parts += ["## Config", *config] if config else []
    if entry.spec and entry.spec.columns:
        parts += ["## What it reads", _columns(entry.spec)]
    if said.returns and entry.spec:
        parts += [_sentence(f"Returns {said.returns[0].lower()}{said.returns[1:]}")]
    if "Watch" in labelled:
        items = re.split(r";\s+(?=`)", labelled["Watch"])
        parts += ["## What to watch", "\n".join(f"- {item}" for item in items)]
    if "Cost" in labelled:
        parts += ["## Cost", _sentence(labelled["Cost"])]
    if "Source" in labelled:
        parts += ["## Source", labelled["Source"]]
    return "\n\n".join(parts) + "\n"


def _sentence(text: str) -> str:
    """With a full stop, and with a capital letter unless it begins with a symbol or a name."""
    word = text.split()[0]
    plain = word.rstrip(".,:;").isalpha() and len(word) > 1
    return f"{text[0].upper() if plain else text[0]}{text[1:].rstrip('.:')}."


def _source_link(entry: Entry) -> str:
    code = Path(importlib.import_module(entry.fn.__module__).__file__ or "").resolve().relative_to(ROOT)
    return f"[{code}]({os.path.relpath(ROOT / code, (FOLDER / entry.path).parent)})"


def _config(entry: Entry) -> Iterator[str]:
    if entry.settings:
        words = " ".join(f"{name}={_value(value)}" for name, value in entry.settings.items())
        yield f"```sh\ntandem train … {words}\n```"
    if entry.spec is None or not entry.spec.options:
        return
    yield "The same in a file, with all options at their defaults:"
    yield f"```yaml\n{snippet(entry)}```"
    rows = [("option", "default", "meaning")]
    arguments = arguments_of(entry)
    for name, (option, value) in options_of(entry).items():
        meaning = arguments.get(option) or _meaning(name)
        shown = "must be given" if name in entry.settings else f"`{_value(value)}`"
        rows.append((f"`{name}`", shown, meaning.rstrip(".")))
    yield _table(rows)


def arguments_of(entry: Entry) -> dict[str, str]:
    """The meaning of each argument, of the function and of what chooses its tokens, if anything does."""
    choice = getattr(entry.spec, "selection", None)
    return (parse(choice.fn).arguments if choice else {}) | entry.said.arguments


def options_of(entry: Entry) -> dict[str, tuple[str, Any]]:
    """By key: the option of a registered function, and what a run takes that does not set it."""
    assert entry.spec is not None, entry.name
    names = {option_key(entry.kind, option): option for option in entry.spec.options}
    return {name: (option, default_of(name, entry.spec.options[option])) for name, option in names.items()}


def snippet(entry: Entry) -> str:
    """The settings and all options, as YAML."""
    options = {name: value for name, (_, value) in options_of(entry).items()}
    return OmegaConf.to_yaml(OmegaConf.create(nested(entry.settings | options | entry.settings)))


def _meaning(name: str) -> str:
    key = keys(TrainConfig).get(name)
    return (key.info.description or "") if key else "as in the equation"


def _columns(spec: Spec) -> str:
    rows = [("column", "shape and meaning")]
    rows += [(f"`{name}`", spec.known_columns[name]) for name in spec.columns]
    return _table(rows)


def index(all_entries: list[Entry]) -> str:
    """The index, in Markdown."""
    rows = [("name", "kind", "needs", "level", "cost", "paper")]
    for entry in all_entries:
        also = f" ({_ticked(entry.aliases)})" if entry.aliases else ""
        rows.append(
            (
                f"[`{entry.name}`]({entry.path}){also}",
                entry.kind.singular,
                needs(entry.spec) if entry.spec else "",
                level_of(entry) if entry.spec else "",
                entry.said.labelled.get("Cost", "").rstrip("."),
                paper(entry.said.labelled.get("Source", "")),
            )
        )
    return "\n\n".join([INTRODUCTION, _table(rows)]) + "\n"


INTRODUCTION = """# Algorithms

Every algorithm is a pure function: columns of the batch and numbers in, tensors out. Its signature says what
it reads, and the loop provides that and nothing else. These pages are made from docstrings and signatures by
`make docs`. [Your own algorithm](../your-own-algorithm.md) is a function in a file of yours.

- **needs**: what the run has for it besides the policy and its samples.
- **level**: `token`, each token by itself; `sequence`, one number or ratio for a whole response; `batch`, the
  responses beside it count too. Found by running the function on a small batch.
- **cost**: what it adds to a step."""


def level_of(entry: Entry) -> str:
    """See `docs.probe.level`."""
    assert entry.spec is not None, entry.name
    settings = entry.settings
    options = {option: settings.get(name, value) for name, (option, value) in options_of(entry).items()}
    return level(entry.spec, entry.spec.select_options({}, options))


def needs(spec: Spec) -> str:
    """What a run must have for an algorithm, in words."""
    return ", ".join(NEEDS[name] for name in spec.columns if name in NEEDS)


def paper(source: str) -> str:
    """The papers of a source, as links."""
    return "; ".join(f"[{who.strip()}]({where})" for who, where in _PAPER.findall(source))


def _ticked(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(rows: list[tuple[str, ...]]) -> str:
    head, *body = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return "\n".join([f"| {head} |", f"|{'---|' * len(rows[0])}", *(f"| {row} |" for row in body)])


def pages() -> dict[str, str]:
    """All pages, by path below docs/algorithms."""
    found = list(entries())
    return {entry.path: page(entry) for entry in found} | {"README.md": index(found)}


def write(folder: Path = FOLDER) -> None:
    """Writes all pages, and removes those of what is no more."""
    made = pages()
    for old in sorted(folder.rglob("*.md")):
        if str(old.relative_to(folder)) not in made:
            old.unlink()
    for path, text in made.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
    print(f"wrote {FOLDER.relative_to(ROOT)}")
