from collections import Counter

import numpy as np
import pytest

from tandem.errors import DataError
from tests.support.runs import assert_same, broken_off, same_weights
from tests.support.tiny import problem, write_rows

OWN = """
from torch.utils.data import Dataset

class Sums(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.rows = [(a, b) for a in range(4) for b in range(3)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        a, b = self.rows[item]
        return {
            "raw_prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "data_source": "own",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {},
        }
"""


def write(lab, name, rows):
    made = [problem(n % 9, n % 8) | {"data_source": "hard" if n % 3 == 2 else "easy"} for n in range(rows)]
    return str(write_rows(lab.folder / name, made))


@pytest.fixture(scope="module")
def words(lab):
    return f"{lab.letters} steps=5 trainer.save_freq=1"


def uids(run, step):
    return run.samples(step)["uid"][::3]


@pytest.mark.slow
def test_a_mixture_over_a_file_that_grew(lab, words):
    """Nine rows make epochs of two steps. After the stop at step 3 there are 21 rows, used from step 5 on."""
    words = (words, "data.mixture={easy: 1, hard: 3}")
    path = write(lab, "mixed.parquet", 9)
    whole = lab.run("mixed", *words, f"data.train_files={path}")
    for step in range(1, 6):
        assert Counter(whole.samples(step)["data_source"]) == {"easy": 3, "hard": 9}
        assert whole.rows[step - 1]["data/share/hard"] == 0.75
    with broken_off(4):
        lab.run("grown", *words, f"data.train_files={path}")
    write(lab, "mixed.parquet", 21)
    grown = lab.run("grown", *words, f"data.train_files={path}")
    assert [uids(grown, step) for step in range(1, 5)] == [uids(whole, step) for step in range(1, 5)]
    assert uids(grown, 5) != uids(whole, 5)
    every = [uid for step in range(1, 6) for uid in uids(grown, step)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("change", ["another prompt", "fewer rows"])
def test_other_old_rows_are_refused_and_other_answers_are_not(lab, words, change):
    path, name = write(lab, "old.parquet", 9), change.replace(" ", "_")
    words = (words, f"data.train_files={path}")
    with broken_off(2):
        lab.run(name, *words)
    rows = [problem(n % 9, n % 8) for n in range(9)]
    rows[0]["reward_model"]["ground_truth"] = "7"
    write_rows(lab.folder / "old.parquet", rows if change == "another prompt" else rows[:8])
    if change == "another prompt":
        lab.run(name, *words, "steps=3 trainer.resume_with_changes=true")
        rows[4] = problem(1, 1)
        write_rows(lab.folder / "old.parquet", rows)
    with pytest.raises(DataError, match="another order of the data") as caught:
        lab.run(name, *words)
    assert ("first 9 are not those" if change == "another prompt" else "rows 8") in str(caught.value)


@pytest.mark.slow
def test_a_dataset_of_ones_own_trains_and_goes_on(lab, words):
    (lab.folder / "own_rows.py").write_text(OWN)
    words = (words, f"data.custom_cls.path={lab.folder / 'own_rows.py'} data.custom_cls.name=Sums")
    whole = lab.run("own", *words)
    assert set(whole.samples(1)["data_source"]) == {"own"}
    assert same_weights(lab.resumed("own_stopped", *words, at=2), whole)


SAMPLER = """
class Worst:
    '''The rows with the lowest mean reward; rows never answered come first, by number.'''

    def __init__(self, dataset, *, batch_size, seed, longest):
        self.rewards = [-1.0] * len(dataset)
        self.longest = longest
        self.read = [record["extra_info"]["question"] for record in dataset.records(range(len(dataset)))]

    def draw(self, count):
        able = [row for row in range(len(self.rewards)) if len(self.read[row]) <= self.longest]
        return sorted(able, key=lambda row: (self.rewards[row], row))[:count]

    def update(self, rows, rewards):
        for row, reward in zip(rows.tolist(), rewards.tolist()):
            self.rewards[row] = reward

    def state_dict(self):
        return {"rewards": self.rewards}

    def load_state_dict(self, state):
        self.rewards = state["rewards"]
"""


@pytest.fixture(scope="module")
def drawing(lab):
    (lab.folder / "own_sampler.py").write_text(SAMPLER)
    own = f"class_path: {lab.folder}/own_sampler.py, class_name: Worst, kwargs: {{longest: 4}}"
    return f"{lab.letters} data.sampler={{{own}}} steps=5 trainer.save_freq=1"


def drawn(run, step):
    samples = run.samples(step)
    scores = np.array(samples["scores"]).reshape(-1, 3).mean(1)
    return samples["index"][::3], scores.tolist()


def test_the_sampler_draws_by_what_it_was_told(lab, drawing):
    """There are 14 questions of four characters; the third step takes the last six and the worst."""
    run = lab.run("worst", drawing)
    known = dict.fromkeys(range(14), -1.0)
    for step in range(1, 6):
        rows, rewards = drawn(run, step)
        assert rows == sorted(known, key=lambda row: (known[row], row))[:4]
        assert run.samples(step)["uid"][::3] == [f"{step - 1}-{row}" for row in rows]
        known |= dict(zip(rows, rewards, strict=True))
    assert drawn(run, 4)[0][:2] == [12, 13]


@pytest.mark.parametrize("built_in", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_draws_as_the_whole_one(lab, drawing, built_in):
    """With dynamic sampling, the sampler draws several times per step and prompts are given back."""
    if built_in:
        drawing = f"{lab.letters} data.sampler.class_name=PassRateSampler steps=5 trainer.save_freq=1"
    drawing += " F.enable=true data.gen_batch_size=5 A.ppo_mini_batch_size=2"
    whole = lab.run(f"whole_{built_in}", drawing)
    assert any(row["sampling/gen_batches"] > 1 or row["sampling/surplus_groups"] > 0 for row in whole.rows)
    resumed = lab.resumed(f"stopped_{built_in}", drawing, at=4)
    assert_same(resumed, whole)
    assert resumed.samples(5)["uid"] == whole.samples(5)["uid"]


def test_a_checkpoint_of_a_run_with_a_sampler_needs_it(lab, drawing):
    lab.run("with_sampler", drawing, "steps=1")
    with pytest.raises(DataError) as caught:
        lab.run("with_sampler", lab.letters, "trainer.resume_with_changes=true")
    assert caught.value.field == "data.sampler.class_name"


def test_what_the_sampler_raises_ends_the_run(lab, drawing):
    path = lab.folder / "raising.py"
    path.write_text(
        SAMPLER.replace("for row, reward", "raise ValueError('lost count')\n        for row, reward")
    )
    with pytest.raises(ValueError, match="lost count"):
        lab.run("raising", drawing, f"data.sampler.class_path={path}")
