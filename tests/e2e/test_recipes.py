import math
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tandem.config.load import load_train_config
from tandem.config.schema import value_at
from tandem.trainer.assembly import build_ppo
from tests.e2e.keys import ACTOR, ROLLOUT
from tests.e2e.shop import SOURCES
from tests.support.runs import Finished
from tests.support.words import words as full_words

RECIPES = sorted((SOURCES / "examples" / "recipes").glob("*.yaml"))
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kinds = len(set(solution_str))
    return {"score": kinds / 6, "acc": float(kinds > 4)}
"""
MINI = f"{ACTOR}.ppo_mini_batch_size"
NEEDED = {"data.train_batch_size": 4, "data.max_prompt_length": 8, "data.max_response_length": 6, MINI: 4}
SIZES = NEEDED | {
    "data.gen_batch_size": 4,
    "reward_model.overlong_buffer.len": 2,
    f"{ROLLOUT}.n": 3,
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
    sizes = NEEDED | {name: size for name, size in SIZES.items() if name in given}
    if given[f"{ROLLOUT}.n"] == 1:
        sizes[f"{ROLLOUT}.n"] = 1
    if MINI in given and given[MINI] != given.get("data.train_batch_size"):
        sizes[MINI] = 2
    return sizes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_trains(recipe, lab):
    given = leaves(yaml.safe_load(recipe.read_text()))
    folder = lab.folder / recipe.stem
    own = f"data.train_files={lab.train} M.path={lab.model} trainer.default_local_dir={folder} steps=2"
    sizes = [f"{name}={value}" for name, value in small(given).items()]
    words = full_words(own, "trainer.logger=[]", lab.reward(REWARD), *sizes)
    loaded = load_train_config(str(recipe), words)
    changed = {name for name, value in given.items() if value_at(loaded.config, name) != value}
    assert changed <= set(SIZES), "a key of the method was not taken as it stands"
    trainer = build_ppo(loaded.config, say=[].append)
    run = Finished(trainer, folder, [])
    before = run.weights()
    try:
        trainer.fit()
    finally:
        trainer.shutdown()
    assert run.actor.actor.version == 2 * 4 // value_at(loaded.config, MINI)
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
