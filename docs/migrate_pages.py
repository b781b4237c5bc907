"""The pages of other systems' settings, from the tables that read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tandem.migrate import environment, openrlhf, trl_table
from tandem.peers.table import Rule


def from_trl() -> str:
    """The page of TRL's settings, in Markdown."""
    parts = [
        "# From TRL",
        "`tandem from-trl FILE.py`, or `tandem from-trl grpo --name value …`, writes a config from the "
        "settings of TRL 1.16. A file is read and never run. Where TRL's default is another one, the config "
        "says TRL's. TRL counts completions in its batches, Tandem prompts; a training step here is a "
        "generation there, with all of its optimizer steps.",
    ]
    for name, table in {
        **trl_table.TABLES,
        "ModelConfig": trl_table.MODEL,
        "The script's arguments": trl_table.SCRIPT,
        "Settings of earlier versions": trl_table.OLDER,
    }.items():
        parts += [f"## {name}", _settings(table, trl_table.FIELDS.get(name, {}))]
    names = ", ".join(f"`{old}` (`{now}`)" for old, now in trl_table.OLDER_NAMES.items())
    parts.append(f"Names that earlier versions have for settings of 1.16 are read too: {names}.")
    return "\n\n".join(parts) + "\n"


def from_openrlhf() -> str:
    """The page of OpenRLHF's options, in Markdown."""
    defaults = {name: rule.default for name, rule in openrlhf.TABLE.items()}
    parts = [
        "# From OpenRLHF",
        "`tandem from-openrlhf SCRIPT.sh`, or `tandem from-openrlhf --name value …`, writes a config from "
        f"the options of `{openrlhf.MODULE}`, read from OpenRLHF's sources of 2025. Where its default is "
        "another one, the config says OpenRLHF's. `rollout_batch_size` counts prompts in both; "
        "`train_batch_size` counts samples there.",
        _settings(openrlhf.TABLE, defaults),
    ]
    return "\n\n".join(parts) + "\n"


def verl_environment() -> str:
    """The page of the environment variables that verl reads, in Markdown."""
    rows = (
        (f"`{name}`", "acts" if known.acts else "ignored", known.reason)
        for name, known in sorted(environment.VARIABLES.items())
    )
    return (
        "\n\n".join(
            [
                "# Environment variables that verl reads",
                "`--from-verl` gives a run the variables that the script exported. A variable that is not "
                "listed acts on whatever reads it.",
                _table(("variable", "here", "which"), rows),
            ]
        )
        + "\n"
    )


def _settings(table: Mapping[str, Rule], defaults: Mapping[str, object]) -> str:
    def rows() -> Iterable[tuple[str, ...]]:
        for name, rule in table.items():
            key = ", ".join(f"`{part}`" for now in rule.now for part in now.split(", "))
            verdict = "ignored: " if rule.nothing else "not supported: " if rule.refused else ""
            said = verdict + rule.reason
            here = f"{key}: {said}" if key and said else key or said
            yield f"`{name}`", f"`{defaults.get(name)}`", here.replace("|", "\\|")

    return _table(("setting", "default", "here"), rows())


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
