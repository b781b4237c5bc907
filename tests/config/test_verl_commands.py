"""Real command lines from verl's examples (main and 0.6.1), with other paths and vllm instead of sglang."""

import pytest

from docs.verl_commands import COMMANDS, REFUSED, counts, page, refused
from tandem.config.load import load_train_config
from tandem.errors import ConfigErrors

R = "actor_rollout_ref.rollout"


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


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_passes_or_is_refused_for_keys_that_are_listed(name, here):
    words = [replaced(word, here) for word in COMMANDS[name]]
    try:
        load_train_config(None, words)
        keys = set()
    except ConfigErrors as found:
        keys = {str(error.field) for error in found.errors}
    assert keys == refused(name)


def test_the_counts():
    assert counts() == {"text": (34, 34), "turns": (0, 6), "vision": (15, 17), "megatron": (6, 8)}
    assert sum(bool(refused(name)) for name in COMMANDS) == len(REFUSED)


def test_the_page_says_which_are_refused_and_why():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(REFUSED)
    for row in rows:
        _, script, names, why, _ = row.split("|")
        assert {name.strip("` ") for name in names.split(",")} == refused(script.strip("` "))
        assert why.strip()
