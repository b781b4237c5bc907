"""Generate the pages about other systems' settings, from the tables that translate them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tandem.migrate import environment, openrlhf, trl_table
from tandem.peers.table import Rule


def from_trl() -> str:
    """Return the page of TRL's settings in Markdown."""
    parts = [
        "# From TRL",
        "`tandem from-trl FILE.py`, or `tandem from-trl grpo --name value …`, converts the settings of "
        "TRL 1.16 into a config. The file is parsed, not executed. If TRL's default differs, the config "
        "has TRL's default. Batch sizes count completions in TRL and prompts in Tandem. A training step "
        "in Tandem is one generation in TRL with all of its optimizer steps.",
    ]
    for name, table in {
        **trl_table.TABLES,
        "ModelConfig": trl_table.MODEL,
        "The script's arguments": trl_table.SCRIPT,
        "Settings of earlier versions": trl_table.OLDER,
    }.items():
        parts += [f"## {name}", _settings(table, trl_table.FIELDS.get(name, {}))]
    names = ", ".join(f"`{old}` (`{now}`)" for old, now in trl_table.OLDER_NAMES.items())
    parts.append(f"The names of these settings in earlier versions are accepted too: {names}.")
    return "\n\n".join(parts) + "\n"


def from_openrlhf() -> str:
    """Return the page of OpenRLHF's options in Markdown."""
    defaults = {name: rule.default for name, rule in openrlhf.TABLE.items()}
    parts = [
        "# From OpenRLHF",
        "`tandem from-openrlhf SCRIPT.sh`, or `tandem from-openrlhf --name value …`, converts the options "
        f"of `{openrlhf.MODULE}` into a config. They come from OpenRLHF's sources of 2025. If "
        "OpenRLHF's default differs, the config has it. `rollout_batch_size` counts prompts in both systems. "
        "`train_batch_size` counts samples in OpenRLHF.",
        _settings(openrlhf.TABLE, defaults),
    ]
    return "\n\n".join(parts) + "\n"


def verl_environment() -> str:
    """Return the page of the environment variables that verl reads, in Markdown."""
    rows = (
        (f"`{name}`", "used" if known.acts else "ignored", known.reason)
        for name, known in sorted(environment.VARIABLES.items())
    )
    return (
        "\n\n".join(
            [
                "# Environment variables that verl reads",
                "`--from-verl` passes the variables that the script exports to the run. A variable that "
                "is not listed here affects every library that reads it.",
                _table(("variable", "in Tandem", "details"), rows),
            ]
        )
        + "\n"
    )


def _settings(table: Mapping[str, Rule], defaults: Mapping[str, object]) -> str:
    def rows() -> Iterable[tuple[str, ...]]:
        for name, rule in table.items():
            key = ", ".join(f"`{part}`" for now in rule.now for part in now.split(", "))
            verdict = "ignored: " if rule.nothing else "not supported: " if rule.refused else ""
            details = verdict + rule.reason
            here = f"{key}: {details}" if key and details else key or details
            yield f"`{name}`", f"`{defaults.get(name)}`", here.replace("|", "\\|")

    return _table(("setting", "default", "in Tandem"), rows())


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
