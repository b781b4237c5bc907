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
def reward(lab):
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
def test_the_recipe_trains(recipe, lab, reward):
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
def test_the_recipe_is_sound_at_its_own_sizes(recipe, lab):
    own = [f"data.train_files={lab.train}", f"actor_rollout_ref.model.path={lab.model}"]
    assert load_train_config(str(recipe), own).notices == ()


def test_every_recipe_is_listed_and_names_its_paper():
    listed = (RECIPES[0].parent / "README.md").read_text()
    assert {"grpo", "dapo", "ppo"} <= {recipe.stem for recipe in RECIPES}
    for recipe in RECIPES:
        assert f"]({recipe.name})" in listed
        assert "https://arxiv.org/abs/" in recipe.read_text().split("data:")[0]


KEYS = {
    "batch": "data.train_batch_size",
    "n": f"{ROLLOUT}.n",
    "mini": f"{ACTOR}.ppo_mini_batch_size",
    "length": "data.max_response_length",
    "clip": f"{ACTOR}.clip_ratio",
    "low": f"{ACTOR}.clip_ratio_low",
    "high": f"{ACTOR}.clip_ratio_high",
    "kl loss": f"{ACTOR}.kl_loss_coef",
    "kl": "algorithm.kl_ctrl.kl_coef",
    "lam": "algorithm.lam",
    "value clip": "critic.cliprange_value",
    "overlong": "reward_model.overlong_buffer.len",
    "by std": "algorithm.norm_adv_by_std_in_grpo",
}
TOKENS, SUMS, MEANS = "token-mean", "seq-mean-token-sum", "seq-mean-token-mean"
METHODS: dict[str, tuple[tuple[str, str, str], dict[str, Any]]] = {
    "cispo": (("grpo", "cispo", TOKENS), {"low": 1.0}),
    "dapo": (
        ("grpo", "vanilla", TOKENS),
        {"low": 0.2, "high": 0.28, "batch": 512, "n": 16, "mini": 32, "length": 20480, "overlong": 4096},
    ),
    "dr_grpo": (("dr_grpo", "vanilla", f"{SUMS}-norm"), {"n": 8, "length": 3000, "clip": 0.2}),
    "grpo": (("grpo", "vanilla", MEANS), {"batch": 16, "n": 64, "mini": 16, "kl loss": 0.04, "length": 1024}),
    "gspo": (("grpo", "gspo", MEANS), {"low": 3e-4, "high": 4e-4}),
    "pass_at_k": (("grpo_passk", "vanilla", SUMS), {"by std": False}),
    "ppo": (
        ("gae", "vanilla", TOKENS),
        {"batch": 512, "n": 1, "mini": 64, "kl": 0.02, "clip": 0.2, "lam": 0.95, "value clip": 0.2},
    ),
    "reinforce_plus_plus": (("reinforce_plus_plus", "vanilla", MEANS), {"kl": 0.001, "n": 1, "clip": 0.2}),
    "remax": (("remax", "reinforce", SUMS), {"kl": 0.05, "n": 1}),
    "rloo": (("rloo", "reinforce", SUMS), {"kl": 0.03, "batch": 512, "n": 4}),
}
"""By recipe: the estimator, loss and aggregation of the paper, and numbers in it or in its authors' code."""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_is_the_papers_method_with_the_published_numbers(recipe):
    given = leaves(yaml.safe_load(recipe.read_text()))
    method, published = METHODS[recipe.stem]
    loss, mode = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
    found = given["algorithm.adv_estimator"], given.get(loss, "vanilla"), given.get(mode, TOKENS)
    assert found == method
    assert {name: given.get(KEYS[name]) for name in published} == published
    assert {path.stem for path in RECIPES} == set(METHODS)
