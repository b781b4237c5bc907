"""Generate the page of verl's commands: which example commands load, and why others do not."""

from __future__ import annotations

import json

from docs.verl_keys import HERE, table
from tandem.peers.table import rule_of

COMMANDS: dict[str, list[str]] = json.loads((HERE.parent / "tests/config/verl_commands.json").read_text())
"""The arguments of verl's trainer in each example script, of verl's main branch and 0.6.1."""
_ROLLOUT = "actor_rollout_ref.rollout"
_TOOLS, _TALK = (f"{_ROLLOUT}.multi_turn.{name}_config_path" for name in ("tool", "interaction"))

REFUSED = {
    "run_qwen3_5_4b_fsdp.sh": {"distillation.enabled"},
    "run_qwen3_8b_mopd_fsdp.sh": {"distillation.enabled"},
    "run_qwen2.5-3b_geo3k_multiturn_4xgpu.sh": {_TOOLS},
    "run_qwen2.5-0.5b_gsm8k_multiturn_w_interaction.sh": {_TALK},
    "run_qwen2.5-3b_gsm8k_multiturn_4xgpu.sh": {_TOOLS, _TALK},
    "run_qwen2.5-3b_gsm8k_multiturn_server.sh": {_TOOLS},
    "run_qwen2.5-3b_gsm8k_tool_agent_mlflow.sh": {_TOOLS},
    "run_qwen3_4b_dapo_multiturn.sh": {
        f"{_ROLLOUT}.multi_turn.enable",
        _TOOLS,
    },
}
"""The keys for which a script is refused, by script; a test loads every command."""

KINDS = {
    "text": "text, one turn",
    "turns": "text, several turns, tools or agents",
    "vision": "images",
    "megatron": "Megatron",
}


def kind(script: str) -> str:
    """Return the kind of training that a script does, a key of `KINDS`."""
    text = " ".join(COMMANDS[script])
    if "megatron" in script or "strategy=megatron" in text:
        return "megatron"
    if "vl" in script or ("geo3k" in text and "multiturn" not in script):
        return "vision"
    return "turns" if "multi_turn" in text or "multiturn" in script or "agent" in script else "text"


def refused(script: str) -> set[str]:
    """Return the keys for which a script is refused; an empty set means that it loads."""
    return REFUSED.get(script.rpartition("/")[2], set())


def counts() -> dict[str, tuple[int, int]]:
    """Return the number of scripts that load and of all scripts, by kind."""
    of = {name: [script for script in COMMANDS if kind(script) == name] for name in KINDS}
    return {name: (sum(not refused(script) for script in those), len(those)) for name, those in of.items()}


def page() -> str:
    """Return the page in Markdown."""
    found = counts()
    passed, total = (sum(pair[place] for pair in found.values()) for place in (0, 1))
    failing = sorted(script for script in COMMANDS if refused(script))
    parts = [
        "# verl's own commands",
        f"verl's examples (main branch and 0.6.1) have {total} commands. {passed} of them load: `tandem "
        "check` refuses none of their keys. Only paths are changed. "
        "Some problems show only later, with data and models: rows with images are refused when they are "
        "read, and a reward model is refused when it is loaded if its vocabulary differs from the "
        "policy's.",
        table(
            ("training", "commands that load", "all commands"),
            [(KINDS[name], str(load), str(of)) for name, (load, of) in found.items()],
        ),
        "The other commands are refused because of these keys:",
        table(
            ("script", "keys", "why"),
            [
                (
                    f"`{script}`",
                    ", ".join(f"`{name}`" for name in sorted(refused(script))),
                    "; ".join(sorted({str(rule.refused) for rule in map(rule_of, refused(script)) if rule})),
                )
                for script in failing
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"
