"""Real command lines of verl's examples (main and 0.6.1), with paths replaced and sglang become vllm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config.load import load_train_config
from tandem.errors import ConfigErrors

COMMANDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("verl_commands.json").read_text())
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TOOLS, TALK = f"{R}.multi_turn.tool_config_path", f"{R}.multi_turn.interaction_config_path"
ROUTER = f"{A}.megatron.override_transformer_config.moe_z_loss_coeff"

REFUSED = {
    "run_qwen3_5_4b_fsdp.sh": {"distillation.enabled"},
    "run_qwen3_8b_mopd_fsdp.sh": {"distillation.enabled"},
    "run_qwen3_5_35b_megatron.sh": {ROUTER},
    "run_qwen3_vl_30b_a3b_megatron.sh": {ROUTER},
    "run_mistral13b_skyworkrm_hhrlhf.sh": {"reward_model.model.input_tokenizer"},
    "run_qwen2.5-3b_geo3k_multiturn_4xgpu.sh": {TOOLS},
    "run_qwen2.5-0.5b_gsm8k_multiturn_w_interaction.sh": {TALK},
    "run_qwen2.5-3b_gsm8k_multiturn_4xgpu.sh": {TOOLS, TALK},
    "run_qwen2.5-3b_gsm8k_multiturn_server.sh": {TOOLS},
    "run_qwen2.5-3b_gsm8k_tool_agent_mlflow.sh": {TOOLS},
    "run_qwen3_4b_dapo_multiturn.sh": {
        "data.custom_cls.path",
        "data.custom_cls.name",
        f"{R}.multi_turn.enable",
        TOOLS,
    },
}
"""Script → keys for which it is refused: a teacher, a loss of the router, a reward model with another
tokenizer, several turns and tools."""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    (folder / "model").mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / "model" / name).write_text("{}")
    (folder / "a.parquet").touch()
    (folder / "score.py").write_text("def compute_score(*a, **k): return 0.0\n")
    return folder


def replaced(word, here):
    name, _, value = word.partition("=")
    bare = name.lstrip("+")
    if bare in ("data.train_files", "data.val_files"):
        value = here / "a.parquet"
    elif bare.endswith((".model.path", "model_path")):
        value = here / "model"
    elif bare.endswith("custom_reward_function.path"):
        value = here / "score.py"
    elif bare == f"{R}.name" and value == "sglang":
        value = "vllm"
    elif bare.endswith("lora_adapter_path"):
        value = "null"
    return f"{name}={value}"


def kind(name, words):
    text = " ".join(words)
    if "megatron" in name or "strategy=megatron" in text:
        return "megatron"
    if "vl" in name or ("geo3k" in text and "multiturn" not in name):
        return "vision"
    return "turns" if "multi_turn" in text or "multiturn" in name or "agent" in name else "text"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_passes_or_is_refused_for_keys_that_are_listed(name, here):
    words = [replaced(word, here) for word in COMMANDS[name]]
    try:
        load_train_config(None, words)
        refused = set()
    except ConfigErrors as found:
        refused = {str(error.field) for error in found.errors}
    assert refused == REFUSED.get(name.rpartition("/")[2], set())


def test_the_counts():
    kinds = [kind(name, words) for name, words in COMMANDS.items()]
    refused = [kind(name, words) for name, words in COMMANDS.items() if name.rpartition("/")[2] in REFUSED]
    assert {each: (kinds.count(each) - refused.count(each), kinds.count(each)) for each in set(kinds)} == {
        "text": (33, 34),
        "megatron": (6, 8),
        "vision": (15, 17),
        "turns": (0, 6),
    }
