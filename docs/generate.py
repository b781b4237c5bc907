"""Generate the pages of algorithms and their index, from docstrings and signatures.

Every registered algorithm gets a page without any change in this module.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from docs import equations
from docs.docstring import parse
from docs.entries import FOLDER, ROOT, Entry, entries
from docs.kinds import NEEDS, Kind
from docs.probe import level
from tandem.algorithms.registry import PolicyLossSpec, Spec
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, nested

_PAPER = re.compile(r"([^;]*?\d{4}\b(?: \([^)]*\))?)[^;]*?(https?://[^\s,;]+[^\s,;.])")


def option_key(kind: Kind, option: str) -> str:
    """Return the key that sets an option: its own key, or an entry of the `kwargs` mapping."""
    own = (f"{section}.{option}" for section in kind.sections)
    return next((name for name in own if name in keys(TrainConfig)), f"{kind.by_name}.{option}")


def default_of(name: str, declared: Any) -> Any:
    """Return the value of an option that a run does not set.

    This is the default of the key, or without one the default in the signature.
    """
    key = keys(TrainConfig).get(name)
    while key is not None and key.inherits is not None:
        key = keys(TrainConfig)[key.inherits]
    return declared if key is None or key.default is None else key.default


def page(entry: Entry) -> str:
    """Return the page of an algorithm in Markdown."""
    docstring, labelled = entry.docstring, entry.docstring.labelled
    parts = [f"# `{entry.name}`", _sentence(docstring.summary)]
    also = f"; also called {_ticked(entry.aliases)}" if entry.aliases else ""
    parts.append(_sentence(f"{entry.kind.singular}{also}. Code: {_source_link(entry)}"))
    if "When to use" in labelled:
        parts += ["## When to use", _sentence(labelled["When to use"])]
    if docstring.equation:
        parts += ["## Equation", *equations.shown(docstring)]
    parts += docstring.notes
    config = list(_config(entry))
    parts += ["## Config", *config] if config else []
    if entry.spec and entry.spec.columns:
        parts += ["## Inputs", _columns(entry.spec, entry.docstring.arguments)]
    if docstring.returns and entry.spec:
        parts += [_sentence(f"Returns {docstring.returns[0].lower()}{docstring.returns[1:]}")]
    if "Watch" in labelled:
        items = re.split(r";\s+(?=`)", labelled["Watch"])
        parts += ["## What to watch", "\n".join(f"- {item}" for item in items)]
    if "Cost" in labelled:
        parts += ["## Cost", _sentence(labelled["Cost"])]
    if "Source" in labelled:
        parts += ["## Source", labelled["Source"]]
    return "\n\n".join(parts) + "\n"


def _sentence(text: str) -> str:
    """End the text with a period. Capitalize the first word unless it is a symbol or a name."""
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
    yield from (note.format(name=entry.name) for note in entry.kind.notes)
    if entry.spec is None or not entry.spec.options:
        return
    yield "The same in a YAML file, with the defaults of all options:"
    yield f"```yaml\n{snippet(entry)}```"
    rows = [("option", "default", "meaning")]
    arguments = arguments_of(entry)
    for name, (option, value) in options_of(entry).items():
        meaning = arguments.get(option) or _meaning(name)
        shown = "required" if name in entry.settings else f"`{_value(value)}`"
        rows.append((f"`{name}`", shown, meaning.rstrip(".")))
    yield _table(rows)


def arguments_of(entry: Entry) -> dict[str, str]:
    """Return the meaning of each argument of the function and of its token selection, if any."""
    choice = entry.spec.selection if isinstance(entry.spec, PolicyLossSpec) else None
    return (parse(choice.fn).arguments if choice else {}) | entry.docstring.arguments


def options_of(entry: Entry) -> dict[str, tuple[str, Any]]:
    """Return the options of a registered function by config key, each with its default in a run."""
    declared = entry.spec.options if entry.spec else {}
    names = {option_key(entry.kind, option): option for option in declared}
    return {name: (option, default_of(name, declared[option])) for name, option in names.items()}


def snippet(entry: Entry) -> str:
    """Return the settings and all options as YAML."""
    options = {name: value for name, (_, value) in options_of(entry).items()}
    return OmegaConf.to_yaml(OmegaConf.create(nested(entry.settings | options | entry.settings)))


def _meaning(name: str) -> str:
    key = keys(TrainConfig).get(name)
    return (key.info.description or "") if key else "see the equation"


def _columns(spec: Spec, own: Mapping[str, str]) -> str:
    """Return the table of columns, described by the docstring's `Args:` or else by the registry."""
    rows = [("column", "shape and meaning")]
    rows += [(f"`{name}`", own.get(name, spec.known_columns[name]).rstrip(".")) for name in spec.columns]
    return _table(rows)


def index(all_entries: list[Entry]) -> str:
    """Return the index in Markdown."""
    rows = [("name", "kind", "needs", "level", "cost", "paper")]
    for entry in all_entries:
        also = f" ({_ticked(entry.aliases)})" if entry.aliases else ""
        rows.append(
            (
                f"[`{entry.name}`]({entry.path}){also}",
                entry.kind.singular,
                needs(entry.spec) if entry.spec else entry.kind.needs,
                level_of(entry) if entry.spec else entry.kind.level,
                entry.docstring.labelled.get("Cost", "").rstrip("."),
                paper(entry.docstring.labelled.get("Source", "")),
            )
        )
    return "\n\n".join([INTRODUCTION, _table(rows)]) + "\n"


INTRODUCTION = """# Algorithms

Every algorithm is a pure function: it takes columns of the batch and numbers, and returns tensors. Its
signature names the inputs, and the training loop computes only these inputs. `make docs` generates these
pages from docstrings and signatures. To use [your own algorithm](../your-own-algorithm.md), write a function
in a file. [These tests](tests.md) check each algorithm against its equation.

- **needs**: what the run must have besides the policy and its samples.
- **level**: `token` means that each token counts by itself; `sequence` means that there is one number or
  ratio for a whole response; `batch` means that other responses in the batch count too. The level is found by
  running the registered function on a small batch.
- **cost**: how much the algorithm adds to a step."""


def level_of(entry: Entry) -> str:
    """Return the level of a registered algorithm; see `docs.probe.level`."""
    assert entry.spec is not None, entry.name
    settings = entry.settings
    options = {option: settings.get(name, value) for name, (option, value) in options_of(entry).items()}
    return level(entry.spec, entry.spec.select_options({}, options))


def needs(spec: Spec) -> str:
    """Return in words what a run must have for an algorithm."""
    return ", ".join(NEEDS[name] for name in spec.columns if name in NEEDS)


def paper(source: str) -> str:
    """Return links to the papers in a source paragraph."""
    return "; ".join(f"[{who.strip()}]({where})" for who, where in _PAPER.findall(source))


def _ticked(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(rows: list[tuple[str, ...]]) -> str:
    head, *body = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return "\n".join([f"| {head} |", f"|{'---|' * len(rows[0])}", *(f"| {row} |" for row in body)])


def pages() -> dict[str, str]:
    """Return all pages except the page of tests, by path below docs/algorithms.

    Links in a page are relative to its path.
    """
    found = list(entries())
    return {entry.path: page(entry) for entry in found} | {"README.md": index(found)}
