"""Writes docs/verl/keys.md: what each key of verl's trainer is here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.schema import keys, shown
from tandem.config.verl.defaults import DEFAULTS, KEPT
from tandem.config.verl.table import rule_of

HERE = Path(__file__).parent
VERL: dict[str, Any] = json.loads((HERE / "verl_0_9_1.json").read_text())
"""verl 0.9.1's keys of `ppo_trainer` but `_target_`, and their defaults; interpolations stay."""


def verdict(name: str) -> tuple[str, str]:
    """Where a key stands, and what it is here."""
    if name in keys(TrainConfig):
        return "same", ""
    rule = rule_of(name)
    return ("no verdict", "") if rule is None else (rule.verdict, str(rule))


def page() -> str:
    """The page, in Markdown."""
    rows = [(name, *verdict(name)) for name in VERL]
    counts = Counter(found for _, found, _ in rows)
    parts = [
        "# verl's keys",
        f"All {len(rows)} keys of `ppo_trainer` in verl 0.9.1. A command line may use them as they are: "
        "each key that is another here, or that nothing here depends on, is said once when the run starts. "
        "A value that asks for what is not offered is refused before anything is loaded; its default asks "
        "for nothing.",
        _table(("verdict", "keys"), [(found, str(count)) for found, count in counts.most_common()]),
        "## Defaults that are others in verl",
        "`trainer.defaults=verl` takes these:",
        _table(
            ("key", "here", "verl"),
            [
                (f"`{name}`", _code(keys(TrainConfig)[name].default), _code(value))
                for name, value in DEFAULTS.items()
            ],
        ),
        "These stay, as neither what is learnt nor where files lie depends on them:",
        _table(
            ("key", "verl", "why ours stays"),
            [(f"`{name}`", _code(value), why) for name, (value, why) in KEPT.items()],
        ),
        "## All keys",
        _table(
            ("key", "verl's default", "verdict", "here"),
            [(f"`{name}`", _code(VERL[name]), found, what) for name, found, what in rows],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def write(folder: Path = HERE / "verl") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "keys.md").write_text(page())


def _code(value: Any) -> str:
    return f"`{shown(value)}`".replace("|", "\\|")


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
