"""Command lines of verl's example scripts; only paths, devices, loggers and the engine are changed."""

import json
import math
from pathlib import Path

import pytest

from tandem.observability.run import read_metrics
from tests.support.tiny import make_model, problem, write_rows
from tests.support.warm import cold

SCRIPTS = json.loads(Path(__file__).with_name("verl_examples.json").read_text())
"""By method: the script in verl's repository (main of August 2026, or 0.6.1), and its words."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest):
    length = len(solution_str)
    return {"score": length % 3.0, "accuracy_reward": float(length % 3 == 0), "format_reward": length % 2.0}
"""

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Return replacements for the paths in the scripts; the model ends a response after about 46 tokens."""
    folder = tmp_path_factory.mktemp("verl")
    model = make_model(folder / "model", kind="qwen3", max_position_embeddings=16384, initializer_range=0.02)
    rows = [problem(a, b) | {"data_source": "openai/gsm8k"} for a in range(60) for b in range(20)]
    (folder / "reward.py").write_text(REWARD)
    return {
        "model.path": str(model),
        "train_files": str(write_rows(folder / "train.parquet", rows)),
        "val_files": str(write_rows(folder / "val.parquet", rows[:8])),
        "custom_reward_function.path": str(folder / "reward.py"),
        "rollout.name": "native",
        "parallel_size": "1",
        "n_gpus_per_node": "1",
        "trainer.logger": "[console]",
    }


def placed(word: str, places: dict[str, str]) -> str:
    name, _, value = word.partition("=")
    return f"{name}={next((places[end] for end in places if name.endswith(end)), value)}"


@pytest.mark.parametrize("method", list(SCRIPTS))
def test_two_steps(method, places, tmp_path):
    words = [placed(word, places) for word in SCRIPTS[method]["words"]]
    run = tmp_path / "run"
    ours = ["trainer.n_gpus_per_node=1", "trainer.total_training_steps=2", f"trainer.default_local_dir={run}"]
    done = cold("-m", "tandem", "train", *words, "trainer.defaults=verl", *ours, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert math.isfinite(row["actor/grad_norm"]) and row["response_length/mean"] > 10
        assert ("critic/grad_norm" in row) == (method == "ppo")
