"""Values that are fitted to the run for keys that the user did not set."""

from pathlib import Path

import pytest

from tandem.config.load import Loaded, load_train_config
from tandem.config.root import TrainConfig
from tandem.trainer.loop import Rhythm
from tests.support.tiny import make_model, write_problems

N, BATCH, TEST = "actor_rollout_ref.rollout.n", "data.train_batch_size", "trainer.test_freq"
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz"


class Chosen:
    """Loads a config from the required keys and further overrides."""

    def __init__(self, folder: Path) -> None:
        make_model(folder / "model")
        train, self.val = write_problems(folder)
        self._words = [f"actor_rollout_ref.model.path={folder / 'model'}", f"data.train_files={train}"]

    def __call__(self, *words: str, rows: int = 1000) -> dict[str, object]:
        return {name: value for name, (value, _) in self.load(*words, rows=rows).chosen.items()}

    def load(self, *words: str, rows: int = 1000) -> Loaded[TrainConfig]:
        words = (*self._words, "algorithm.adv_estimator=grpo", *words)
        return load_train_config(None, words, count_rows=lambda *files: rows)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Chosen:
    return Chosen(tmp_path_factory.mktemp("fitted"))


def test_what_nobody_set_fits_the_run(chosen):
    assert chosen() == {N: 8, BATCH: 64, DYNAMIC: True}
    assert chosen(rows=20) == {N: 8, BATCH: 20, DYNAMIC: True}


def test_what_is_set_stays(chosen):
    words = (f"{N}=3", f"{BATCH}=16", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2")
    assert chosen(*words) == {}
    assert BATCH not in chosen("actor_rollout_ref.actor.ppo_mini_batch_size=256")


def test_only_estimators_that_compare_get_several_responses(chosen):
    assert N not in chosen("algorithm.adv_estimator=reinforce_plus_plus")


def test_a_run_validates_ten_times(chosen):
    words = (f"data.val_files={chosen.val}", "trainer.total_training_steps=200")
    assert chosen(*words)[TEST] == 20
    assert chosen(*words, rows=5)[TEST] == 20
    assert chosen(f"data.val_files={chosen.val}", "trainer.total_epochs=4")[TEST] == 6  # the run has 60 steps
    assert TEST not in chosen(*words, f"{TEST}=7")


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (2, 2), (10, 10), (25, 13), (200, 10)])
def test_as_many_validations_are_said_as_there_will_be(chosen, steps, count):
    loaded = chosen.load(f"data.val_files={chosen.val}", f"trainer.total_training_steps={steps}")
    freq, why = loaded.chosen[TEST]
    assert why == f"{count} validation{'s' * (count > 1)}"
    rhythm = Rhythm(steps, freq, 0)
    assert count == sum(rhythm.validates(step) for step in range(1, steps + 1))


def test_the_longest_sequence_fits_the_token_budget(chosen):
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    words = ("data.max_prompt_length=2000", "data.max_response_length=40000")
    assert chosen(*words)[budget] == 42000
    fixed = (f"{DYNAMIC}=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
    assert budget not in chosen(*words, *fixed)
