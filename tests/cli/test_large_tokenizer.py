"""A tokenizer with more ids than the model has embeddings is refused before anything is loaded."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tandem.cli.main import main
from tests.support.runs import Lab, lab

__all__ = ["lab"]

SIZE = 46
SAID = ("smaller than that of the tokenizer", f"{SIZE} tokens", f">= {SIZE + 1}")


@pytest.fixture(scope="module")
def larger(lab: Lab) -> Path:
    """Return a folder with the model's tokenizer plus one token."""
    tokenizer = AutoTokenizer.from_pretrained(lab.model)
    assert len(tokenizer) == SIZE
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(lab.folder / "larger")
    return lab.folder / "larger"


def supervised(lab: Lab, folder: Path, row: dict[str, str]) -> list[str]:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return [
        f"data.train_files={file}", "data.train_batch_size=1", f"model.path={lab.model}",
        f"trainer.default_local_dir={folder / 'run'}", "trainer.logger=[]", "trainer.device=cpu",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["train", "sft", "rm", "eval", "generate"])
def test_it_is_named_by_every_command(lab, larger, tmp_path, capsys, command):
    offline = [f"data.path={lab.train}", f"model.path={lab.model}", "data.max_response_length=2"]
    given = {
        "train": lab.overrides(tmp_path / "run"),
        "sft": supervised(lab, tmp_path, {"prompt": "1+1=", "response": "2"}),
        "rm": supervised(lab, tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}),
        "generate": [*offline, f"data.output_path={tmp_path / 'out.parquet'}", "trainer.device=cpu"],
        "eval": [*offline, f"data.output_path={tmp_path / 'out.json'}", "trainer.device=cpu"],
    }[command]
    at = "actor_rollout_ref.model" if command == "train" else "model"
    given.append(f"{at}.tokenizer_path={larger}")
    checks = {
        "train": ["check", "--here"],
        "sft": ["check", "--sft", "--here"],
        "rm": ["check", "--rm", "--here"],
    }
    for words in ([command], checks.get(command)):
        if words is None:
            continue
        assert main([*words, *given]) == 1
        error = capsys.readouterr().err
        assert all(part in error for part in (*SAID, f"{at}.tokenizer_path")), error
    assert not (tmp_path / "run").exists()


def test_a_critic_reads_the_same_ids(lab, tmp_path, capsys):
    critic = tmp_path / "critic"
    critic.mkdir()
    for file in lab.model.iterdir():
        (critic / file.name).write_bytes(file.read_bytes())
    stored = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(stored | {"vocab_size": SIZE - 1}))
    given = [*lab.overrides(tmp_path / "run"), "algorithm.adv_estimator=gae", f"critic.model.path={critic}"]
    for words in (["check", "--here"], ["train"]):
        assert main([*words, *given]) == 1
        error = capsys.readouterr().err
        assert "critic.model.path" in error and f"{SIZE - 1} tokens" in error
