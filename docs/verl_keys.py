"""Generate the page of verl's keys: what each key of verl's trainer means in Tandem."""

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
"""The keys and defaults of `ppo_trainer` in verl 0.9.1, without `_target_`. Interpolations are kept."""
OTHERS = HERE / "verl_versions.json"
"""Keys of other versions, and of `ppo_megatron_trainer` in 0.9.1; written by `verl_versions.py`."""


def verdict(name: str) -> tuple[str, str]:
    """Return the verdict on a key of verl, and what the key means in Tandem."""
    if name in keys(TrainConfig):
        return "same", ""
    rule = rule_of(name)
    return ("no verdict", "") if rule is None else (rule.verdict, str(rule))


def page() -> str:
    """Return the page in Markdown."""
    rows = [(name, *verdict(name)) for name in VERL]
    counts = Counter(found for _, found, _ in rows)
    parts = [
        "# verl's keys",
        f"All {len(rows)} keys of `ppo_trainer` in verl 0.9.1. You can use them unchanged on a command "
        "line. When the run starts, a message lists each key that has another name in Tandem or no "
        "effect. A value that asks for an unsupported feature is refused before anything is loaded; the "
        "default values are always accepted.",
        table(("verdict", "keys"), [(found, str(count)) for found, count in counts.most_common()]),
        "## Defaults that differ in verl",
        "`trainer.defaults=verl` sets these defaults of verl:",
        table(
            ("key", "Tandem", "verl"),
            [
                (f"`{name}`", _code(keys(TrainConfig)[name].default), _code(value))
                for name, value in DEFAULTS.items()
            ],
        ),
        "These defaults stay as in Tandem, because they change neither the training nor the paths of files:",
        table(
            ("key", "verl", "why Tandem's default stays"),
            [(f"`{name}`", _code(value), why) for name, (value, why) in KEPT.items()],
        ),
        "## All keys",
        table(
            ("key", "verl's default", "verdict", "in Tandem"),
            [(f"`{name}`", _code(VERL[name]), found, what) for name, found, what in rows],
        ),
        "## Keys of other versions",
        "These keys are not in `ppo_trainer` of 0.9.1, but in `ppo_trainer` or `ppo_megatron_trainer` of the "
        "listed versions. The versions 0.6.0, 0.6.1, 0.7.0, 0.7.1, 0.8.0, 0.9.0 and 0.9.1 were compared.",
        table(
            ("key", "versions", "verl's default", "verdict", "in Tandem"),
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
    """Return a table in Markdown."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
