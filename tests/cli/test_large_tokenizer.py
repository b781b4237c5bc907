"""A tokenizer with more ids than the model has embeddings is refused before anything is loaded."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.runs import Lab

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


@pytest.mark.parametrize("command", ["train", "sft", "rm", "eval", "generate"])
def test_it_is_named_by_every_command(lab, larger, tmp_path, refused, command):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}) + "\n")
    given = lab.overrides(tmp_path / "run")
    if command in ("sft", "rm"):
        given = [f"data.train_files={file}", "data.train_batch_size=1", "trainer.logger=[]"]
        given += [f"trainer.default_local_dir={tmp_path / 'run'}"]
    elif command != "train":
        given = [f"data.path={lab.train}", "data.max_response_length=2"]
        given += [f"data.output_path={tmp_path / ('out.json' if command == 'eval' else 'out.parquet')}"]
    if command != "train":
        given += [f"model.path={lab.model}", "trainer.device=cpu"]
    at = "actor_rollout_ref.model" if command == "train" else "model"
    checks = {"train": [["check", "--here"]], "sft": [["check", "--sft", "--here"]]}
    checks["rm"] = [["check", "--rm", "--here"]]
    for words in ([command], *checks.get(command, [])):
        error = refused(*words, *given, f"{at}.tokenizer_path={larger}")
        assert all(part in error for part in (*SAID, f"{at}.tokenizer_path")), error
    assert not (tmp_path / "run").exists()


def test_a_critic_reads_the_same_ids(lab, tmp_path, refused):
    critic = tmp_path / "critic"
    shutil.copytree(lab.model, critic)
    stored = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(stored | {"vocab_size": SIZE - 1}))
    given = [*lab.overrides(tmp_path / "run"), "algorithm.adv_estimator=gae", f"critic.model.path={critic}"]
    for words in (["check", "--here"], ["train"]):
        error = refused(*words, *given)
        assert "critic.model.path" in error and f"{SIZE - 1} tokens" in error
