"""Collect all pages of the site: handwritten pages and pages generated from the code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from docs import (
    api_pages,
    config_pages,
    equations,
    expand,
    failures,
    generate,
    migrate_pages,
    verl_commands,
    verl_keys,
)
from docs.entries import ROOT, entries
from docs.equations import Check

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/cluster/README.md": "examples/cluster.md",
    "examples/recipes/README.md": "examples/recipes.md",
    "examples/reward_model/README.md": "examples/reward_model.md",
    "benchmarks/results/learning_curves.md": "results/learning_curves.md",
}
"""Pages outside docs/ by path, and their places in the site."""


@dataclass(frozen=True)
class Page:
    """A page in Markdown.

    Attributes:
        origin: the path from the root of the repository; links are relative to it. For a generated page, the
            path that it would have.
        text: the Markdown text; `pages` expands its directives.
    """

    origin: str
    text: str

    @property
    def place(self) -> str:
        """The path within the site."""
        return OUTSIDE.get(self.origin) or self.origin.removeprefix("docs/")


def written() -> Iterator[Page]:
    """Yield the handwritten pages, unchanged from the repository."""
    for path in [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in OUTSIDE)]:
        yield Page(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def made(checks: Iterable[Check]) -> Iterator[Page]:
    """Yield the pages that are generated from the code.

    Args:
        checks: the tests of algorithms.
    """
    texts: Mapping[str, str] = {
        **{f"algorithms/{path}": text for path, text in generate.pages().items()},
        f"algorithms/{equations.PAGE}": equations.page(list(entries()), list(checks)),
        "verl/keys.md": verl_keys.page(),
        "verl/commands.md": verl_commands.page(),
        "verl/environment.md": migrate_pages.verl_environment(),
        "from-trl.md": migrate_pages.from_trl(),
        "from-openrlhf.md": migrate_pages.from_openrlhf(),
        **{f"config/{path}": text for path, text in config_pages.pages().items()},
        **{f"api/{path}": text for path, text in api_pages.pages().items()},
        "messages.md": failures.page(),
    }
    for path, text in texts.items():
        yield Page(f"docs/{path}", text)


def pages(checks: Iterable[Check]) -> dict[str, Page]:
    """Return all pages by their place in the site."""
    found = [Page(page.origin, expand.expanded(page.text)) for page in written()]
    return {page.place: page for page in [*found, *made(checks)]}


def source(path: Path) -> str:
    """Return a repository file, or the list of a folder's files, as a page without search entries."""
    names = (file.name for file in sorted(path.glob("*")) if not file.name.startswith("_"))
    text = "\n".join(names) if path.is_dir() else path.read_text(encoding="utf-8").rstrip("\n")
    fence = "`" * (1 + max(2, *(len(run) for run in re.findall("`+", text)), 2))
    kind = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".md": "markdown"}.get(path.suffix, "text")
    title = path.relative_to(ROOT).as_posix()
    return f'---\nsearch:\n  exclude: true\n---\n\n# {title}\n\n{fence}{kind} linenums="1"\n{text}\n{fence}\n'
