"""The page of verl's keys: what each key of verl's trainer is here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.schema import keys, shown
from tandem.config.verl import DEFAULTS, KEPT
from tandem.peers.table import rule_of

HERE = Path(__file__).parent
VERL: dict[str, Any] = json.loads((HERE / "verl_0_9_1.json").read_text())
"""verl 0.9.1's keys of `ppo_trainer` but `_target_`, and their defaults; interpolations stay."""
OTHERS = HERE / "verl_versions.json"
"""Keys of other versions, and of 0.9.1's `ppo_megatron_trainer`; `verl_versions.py` writes them."""


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
        table(("verdict", "keys"), [(found, str(count)) for found, count in counts.most_common()]),
        "## Defaults that are others in verl",
        "`trainer.defaults=verl` takes these:",
        table(
            ("key", "here", "verl"),
            [
                (f"`{name}`", _code(keys(TrainConfig)[name].default), _code(value))
                for name, value in DEFAULTS.items()
            ],
        ),
        "These stay, as neither what is learnt nor where files lie depends on them:",
        table(
            ("key", "verl", "why ours stays"),
            [(f"`{name}`", _code(value), why) for name, (value, why) in KEPT.items()],
        ),
        "## All keys",
        table(
            ("key", "verl's default", "verdict", "here"),
            [(f"`{name}`", _code(VERL[name]), found, what) for name, found, what in rows],
        ),
        "## Keys of other versions",
        "Those that 0.9.1's `ppo_trainer` does not have, but `ppo_trainer` or `ppo_megatron_trainer` of the "
        "versions that are named: 0.6.0, 0.6.1, 0.7.0, 0.7.1, 0.8.0, 0.9.0 and 0.9.1 were looked at.",
        table(
            ("key", "versions", "verl's default", "verdict", "here"),
            [
                (f"`{name}`", ", ".join(row["versions"]), _code(row["default"]), *verdict(name))
                for name, row in json.loads(OTHERS.read_text()).items()
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _code(value: Any) -> str:
    return f"`{shown(value)}`".replace("|", "\\|")


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
