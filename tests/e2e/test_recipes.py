"""Every recipe in examples/recipes runs for two steps on a tiny model with its own method and small sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.load import load_train_config
from tandem.config.schema import value_at
from tandem.trainer.assembly import build_ppo
from tests.e2e.keys import ACTOR, ROLLOUT
from tests.e2e.shop import SOURCES
from tests.support.runs import Finished, Lab

RECIPES = sorted((SOURCES / "examples" / "recipes").glob("*.yaml"))

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kinds = len(set(solution_str))
    return {"score": kinds / 6, "acc": float(kinds > 4)}
"""

SIZES = {
    "data.train_batch_size": 4,
    "data.gen_batch_size": 4,
    "data.max_prompt_length": 8,
    "data.max_response_length": 6,
    "reward_model.overlong_buffer.len": 2,
    f"{ROLLOUT}.n": 3,
    f"{ACTOR}.ppo_mini_batch_size": 2,
    f"{ACTOR}.optim.lr": 0.01,
    f"{ACTOR}.optim.lr_warmup_steps": 0,
    "critic.ppo_mini_batch_size": 2,
    "critic.optim.lr": 0.01,
}
"""The settings for a tiny model; all other settings of a recipe are its method."""


def leaves(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted path."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{at}{name}.") if isinstance(value, Mapping) else {f"{at}{name}": value}
    return found


def small(given: Mapping[str, Any]) -> dict[str, Any]:
    """Make a recipe's sizes small, except that one sample stays one and one update a step stays one."""
    sizes = {name: size for name, size in SIZES.items() if name in given}
    if given[f"{ROLLOUT}.n"] == 1:
        sizes[f"{ROLLOUT}.n"] = 1
    if given.get(f"{ACTOR}.ppo_mini_batch_size") == given.get("data.train_batch_size"):
        sizes[f"{ACTOR}.ppo_mini_batch_size"] = 4
    return sizes


@pytest.fixture(scope="module")
def reward(lab: Lab) -> Path:
    path = lab.folder / "reward.py"
    path.write_text(REWARD)
    return path


def words(lab: Lab, run: Path, given: Mapping[str, Any], reward: Path) -> list[str]:
    keys = {
        "data.train_files": lab.train,
        "actor_rollout_ref.model.path": lab.model,
        "trainer.default_local_dir": run,
        "trainer.total_training_steps": 2,
        "trainer.logger": "[]",
        "custom_reward_function.path": reward,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 8,
        "data.max_response_length": 6,
        f"{ACTOR}.ppo_mini_batch_size": 4,
        **small(given),
    }
    return [f"{name}={value}" for name, value in keys.items()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_trains(recipe: Path, lab: Lab, reward: Path) -> None:
    given = leaves(yaml.safe_load(recipe.read_text()))
    folder = lab.folder / recipe.stem
    loaded = load_train_config(str(recipe), words(lab, folder, given, reward))
    changed = {name for name, value in given.items() if value_at(loaded.config, name) != value}
    assert changed <= set(SIZES), "a key of the method was not taken as it stands"
    trainer = build_ppo(loaded.config, say=[].append)
    run = Finished(trainer, folder, [])
    before = run.weights()
    try:
        trainer.fit()
    finally:
        trainer.shutdown()
    updates = 4 // value_at(loaded.config, f"{ACTOR}.ppo_mini_batch_size")
    assert run.actor.actor.version == 2 * updates
    for row in run.rows[-2:]:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    assert all(bool((value != before[name]).any()) for name, value in run.weights().items())
    assert ("timing/ref" in run.rows[-1]) == loaded.config.needs_reference
    assert ("critic/loss" in run.rows[-1]) == loaded.config.needs_critic


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_is_sound_at_its_own_sizes(recipe: Path, lab: Lab) -> None:
    own = [f"data.train_files={lab.train}", f"actor_rollout_ref.model.path={lab.model}"]
    assert load_train_config(str(recipe), own).notices == ()


def test_every_recipe_is_listed_and_names_its_paper() -> None:
    listed = (RECIPES[0].parent / "README.md").read_text()
    assert {"grpo", "dapo", "ppo"} <= {recipe.stem for recipe in RECIPES}
    for recipe in RECIPES:
        assert f"]({recipe.name})" in listed
        assert "https://arxiv.org/abs/" in recipe.read_text().split("data:")[0]


METHODS = {
    "cispo": ("grpo", "cispo", "token-mean"),
    "dapo": ("grpo", "vanilla", "token-mean"),
    "dr_grpo": ("dr_grpo", "vanilla", "seq-mean-token-sum-norm"),
    "grpo": ("grpo", "vanilla", "seq-mean-token-mean"),
    "gspo": ("grpo", "gspo", "seq-mean-token-mean"),
    "pass_at_k": ("grpo_passk", "vanilla", "seq-mean-token-sum"),
    "ppo": ("gae", "vanilla", "token-mean"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "vanilla", "seq-mean-token-mean"),
    "remax": ("remax", "reinforce", "seq-mean-token-sum"),
    "rloo": ("rloo", "reinforce", "seq-mean-token-sum"),
}
"""By recipe: the estimator, loss and aggregation of the paper."""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_is_the_papers_method(recipe: Path) -> None:
    given = leaves(yaml.safe_load(recipe.read_text()))
    found = (
        given["algorithm.adv_estimator"],
        given.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla"),
        given.get(f"{ACTOR}.loss_agg_mode", "token-mean"),
    )
    assert found == METHODS[recipe.stem]


_CLIPS, _KL = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"), "algorithm.kl_ctrl.kl_coef"
_BATCHES = ("data.train_batch_size", f"{ROLLOUT}.n", f"{ACTOR}.ppo_mini_batch_size")

PUBLISHED = {
    "cispo": {_CLIPS[0]: 1.0},
    "dapo": dict(zip(_CLIPS, (0.2, 0.28), strict=True))
    | dict(zip(_BATCHES, (512, 16, 32), strict=True))
    | {"data.max_response_length": 20480, "reward_model.overlong_buffer.len": 4096},
    "dr_grpo": {f"{ROLLOUT}.n": 8, "data.max_response_length": 3000, f"{ACTOR}.clip_ratio": 0.2},
    "grpo": dict(zip(_BATCHES, (16, 64, 16), strict=True))
    | {f"{ACTOR}.kl_loss_coef": 0.04, "data.max_response_length": 1024},
    "gspo": dict(zip(_CLIPS, (3e-4, 4e-4), strict=True)),
    "pass_at_k": {"algorithm.norm_adv_by_std_in_grpo": False},
    "ppo": dict(zip(_BATCHES, (512, 1, 64), strict=True))
    | {_KL: 0.02, f"{ACTOR}.clip_ratio": 0.2, "algorithm.lam": 0.95, "critic.cliprange_value": 0.2},
    "reinforce_plus_plus": {_KL: 0.001, f"{ROLLOUT}.n": 1, f"{ACTOR}.clip_ratio": 0.2},
    "remax": {_KL: 0.05, f"{ROLLOUT}.n": 1},
    "rloo": {_KL: 0.03, "data.train_batch_size": 512, f"{ROLLOUT}.n": 4},
}
"""By recipe: numbers in its paper or in its authors' code."""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_has_the_published_numbers(recipe: Path) -> None:
    given = leaves(yaml.safe_load(recipe.read_text()))
    published = PUBLISHED[recipe.stem]
    assert {name: given.get(name) for name in published} == published
    assert {recipe.stem for recipe in RECIPES} == set(PUBLISHED)
