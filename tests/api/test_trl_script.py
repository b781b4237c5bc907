"""TRL's own GRPO examples as scripts, in which only the import and the trainer's line are changed."""

import os
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import tandem
from tests.support.tiny import make_model, write_rows
from tests.support.warm import cold

IMPORT = "from trl import GRPOTrainer"

QUICK_START = """
from trl import GRPOTrainer
from datasets import load_dataset
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=dataset, reward_funcs=accuracy_reward)
trainer.train()
"""
OWN_REWARDS = """
from datasets import load_dataset
from trl import GRPOTrainer

dataset = load_dataset("trl-lib/ultrafeedback-prompt", split="train")

def reward_len(completions, **kwargs):
    return [-abs(4 - len(completion[0]["content"])) for completion in completions]

def reward_num_unique_chars(completions, **kwargs):
    return [len(set(completion[0]["content"])) for completion in completions]

trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=[reward_len, reward_num_unique_chars], train_dataset=dataset)
trainer.train()
trainer.save_model("trained")
"""  # noqa: E501
TANDEM = """trainer = tandem.Trainer("Qwen/Qwen2.5-0.5B-Instruct", train=dataset, rewards={rewards}, \
steps=2, out="run", config={{"data.max_response_length": 6, "data.train_batch_size": 12}})"""
ACCURACY = '''
"""Replaces TRL's module of rewards; accuracy_reward has the same signature and gives the same results."""

def accuracy_reward(completions, solution, log_extra=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    log_extra("gold_parsed", list(solution))
    return [float(gold in text) for text, gold in zip(contents, solution, strict=True)]
'''


@pytest.fixture
def folder(tmp_path):
    """Return a folder in which the scripts find the model and the data of the examples as files."""
    make_model(tmp_path / "Qwen/Qwen2.5-0.5B-Instruct")
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "solution": str(a + b)}
        for a in range(4)
        for b in range(3)
    ]
    for name in ("DeepMath-103K", "ultrafeedback-prompt"):
        data = tmp_path / "trl-lib" / name
        data.mkdir(parents=True)
        write_rows(data / "train.parquet", rows)
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").touch()
    (tmp_path / "trl" / "rewards.py").write_text(ACCURACY)
    return tmp_path


def changed(script: str, rewards: str) -> str:
    lines = script.splitlines()
    (imported,) = [number for number, line in enumerate(lines) if line == IMPORT]
    (made,) = [number for number, line in enumerate(lines) if line.startswith("trainer = ")]
    lines[imported], lines[made] = "import tandem", TANDEM.format(rewards=rewards)
    return "\n".join(lines)


def run(folder: Path, script: str):
    (folder / "script.py").write_text(script)
    own = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    done = cold("script.py", cwd=folder, env=os.environ | own, timeout=170)
    assert done.returncode == 0, done.stderr
    found = tandem.open(folder / "run")
    assert found.state == "finished" and found.steps == 2
    return found


@pytest.mark.slow
def test_the_quick_start_with_a_reward_of_trl(folder):
    samples = run(folder, changed(QUICK_START, "accuracy_reward")).samples(step=1)
    assert len(samples) == 12 * 8  # TRL also generates 8 responses per prompt
    for sample in samples:
        a, b = sample["prompt"].removeprefix("user: ").rstrip("=").split("+")
        assert sample["score"] == float(str(int(a) + int(b)) in sample["response"])


@pytest.mark.slow
def test_rewards_of_ones_own_and_the_trained_model(folder):
    found = run(folder, changed(OWN_REWARDS, "[reward_len, reward_num_unique_chars]"))
    for sample in found.samples(step=2):
        text = sample["response"]
        assert sample["score"] == len(set(text)) - abs(4 - len(text))
    trained = AutoModelForCausalLM.from_pretrained(folder / "trained").state_dict()
    before = AutoModelForCausalLM.from_pretrained(folder / "Qwen/Qwen2.5-0.5B-Instruct").state_dict()
    assert trained.keys() == before.keys()
    assert any((trained[name] != before[name]).any() for name in before)
