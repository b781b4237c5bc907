from collections import Counter

import pytest

from tandem.errors import DataError
from tests.support.runs import broken_off, same_weights
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
    """Write rows of which every third has the source hard."""
    made = [problem(n % 9, n % 8) | {"data_source": "hard" if n % 3 == 2 else "easy"} for n in range(rows)]
    return str(write_rows(lab.folder / name, made))


@pytest.fixture(scope="module")
def words(lab):
    return f"{lab.letters} steps=5 trainer.save_freq=1"


def uids(run, step):
    return run.samples(step)["uid"][::3]


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
    said = "whose first 9 are not those of the checkpoint" if change == "another prompt" else "rows 8"
    assert said in str(caught.value)


def test_a_dataset_of_ones_own_trains_and_goes_on(lab, words):
    (lab.folder / "own_rows.py").write_text(OWN)
    words = (words, f"data.custom_cls.path={lab.folder / 'own_rows.py'} data.custom_cls.name=Sums")
    whole = lab.run("own", *words)
    assert set(whole.samples(1)["data_source"]) == {"own"}
    assert same_weights(lab.resumed("own_stopped", *words, at=2), whole)
