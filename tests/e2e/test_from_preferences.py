"""The commands of examples/reward_model with fewer steps.

A reward model that `tandem rm` trained raises the policy's reward, and also the quantity that the preferences
were about.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.observability.run import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def test_a_policy_learns_what_the_preferences_were_about(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    folder = "examples/reward_model"
    for words in (
        [f"{folder}/make_preferences.py"],
        ["-m", "tandem", "rm", f"{folder}/rm.yaml", "trainer.total_training_steps=30"],
        ["-m", "tandem", "export", "runs/preferences", "my_reward_model"],
        ["-m", "tandem", "sft", f"{folder}/sft.yaml", "trainer.total_training_steps=40"],
        ["-m", "tandem", "export", "runs/ratings", "my_policy"],
        ["-m", "tandem", "train", f"{folder}/ppo.yaml", "trainer.total_training_steps=15"],
    ):
        subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, timeout=600)
    first, *_, last = read_metrics(tmp_path / "runs" / "preferred" / "metrics.jsonl")
    for name in ("reward/extra/preferred", "reward/extra/stars"):
        print(f"{name}: {first[name]:.2f} at first, {last[name]:.2f} at last")
        assert last[name] > first[name] + 2
