import numpy as np
import pytest

from tandem.errors import DataError
from tests.support.runs import assert_same

OWN = """
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
def words(lab):
    (lab.folder / "own_sampler.py").write_text(OWN)
    own = f"class_path: {lab.folder}/own_sampler.py, class_name: Worst, kwargs: {{longest: 4}}"
    return f"{lab.letters} data.sampler={{{own}}} steps=5 trainer.save_freq=1"


def drawn(run, step):
    """Return the rows of a step, and the mean reward of each."""
    samples = run.samples(step)
    scores = np.array(samples["scores"]).reshape(-1, 3).mean(1)
    return samples["index"][::3], scores.tolist()


def test_the_sampler_draws_by_what_it_was_told(lab, words):
    """There are 14 questions of four characters; the third step takes the last six and the worst."""
    run = lab.run("worst", words)
    known = dict.fromkeys(range(14), -1.0)
    for step in range(1, 6):
        rows, rewards = drawn(run, step)
        assert rows == sorted(known, key=lambda row: (known[row], row))[:4]
        assert run.samples(step)["uid"][::3] == [f"{step - 1}-{row}" for row in rows]
        known |= dict(zip(rows, rewards, strict=True))
    assert drawn(run, 4)[0][:2] == [12, 13]


@pytest.mark.parametrize("built_in", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_draws_as_the_whole_one(lab, words, built_in):
    """With dynamic sampling, the sampler draws several times per step and prompts are given back."""
    if built_in:
        words = f"{lab.letters} data.sampler.class_name=PassRateSampler steps=5 trainer.save_freq=1"
    words += " F.enable=true data.gen_batch_size=5 A.ppo_mini_batch_size=2"
    whole = lab.run(f"whole_{built_in}", words)
    assert any(row["sampling/gen_batches"] > 1 or row["sampling/surplus_groups"] > 0 for row in whole.rows)
    resumed = lab.resumed(f"stopped_{built_in}", words, at=4)
    assert_same(resumed, whole)
    assert resumed.samples(5)["uid"] == whole.samples(5)["uid"]


def test_a_checkpoint_of_a_run_with_a_sampler_needs_it(lab, words):
    lab.run("with_sampler", words, "steps=1")
    with pytest.raises(DataError) as caught:
        lab.run("with_sampler", lab.letters, "trainer.resume_with_changes=true")
    assert caught.value.field == "data.sampler.class_name"


def test_what_the_sampler_raises_ends_the_run(lab, words):
    path = lab.folder / "raising.py"
    path.write_text(OWN.replace("for row, reward", "raise ValueError('lost count')\n        for row, reward"))
    with pytest.raises(ValueError, match="lost count"):
        lab.run("raising", words, f"data.sampler.class_path={path}")
