import numpy as np
import pytest
import torch

from tandem.data.curriculum import DrawnBatches, PassRateSampler, load_sampler
from tandem.data.prompts import PromptDataset
from tandem.errors import ConfigError, DataError
from tandem.protocol import DataProto
from tests.support.refusing import refused
from tests.support.tiny import make_tokenizer, problem, write_rows

OWN = """
class Own:
    def __init__(self, dataset, *, batch_size, seed, start=0):
        self.rows, self.place, self.told = len(dataset), start, []

    def draw(self, count):
        drawn = [(self.place + i) % self.rows for i in range(count)]
        self.place += count
        return drawn

    def update(self, rows, rewards):
        self.told.append((rows.tolist(), rewards.tolist()))

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Twice(Own):
    def draw(self, count):
        return [3] * count


class Deaf:
    def draw(self, count): ...
"""


@pytest.fixture
def dataset(tmp_path):
    """Return the last 14 of 24 rows. The ten rows before have more than four tokens and are dropped."""
    rows = [problem(a, b) for a in (15, 11, 7, 3) for b in range(2, 9)][4:]
    assert len(rows) == 24
    path = str(write_rows(tmp_path / "train.parquet", rows))
    return PromptDataset(path, make_tokenizer(tmp_path), max_prompt_length=4, filter_overlong_prompts=True)


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def loaded(dataset, path, name, **kwargs):
    return load_sampler(dataset, path=path, name=name, batch_size=4, seed=0, kwargs=kwargs)


def test_rows_are_drawn_by_the_variance_of_their_reward(dataset):
    count = len(dataset)
    sampler = PassRateSampler(dataset, batch_size=1, seed=0, momentum=0.25, floor=0.01)
    rates = np.full(count, 0.5)
    draw = np.random.default_rng(0)
    for _ in range(50):
        rows = draw.choice(count, size=5, replace=False)
        rewards = draw.choice([-1.0, 0.0, 0.25, 1.0, 2.0], size=5)
        sampler.update(rows, rewards)
        for row, reward in zip(rows, rewards, strict=True):
            rates[row] = 0.25 * rates[row] + 0.75 * min(max(reward, 0.0), 1.0)
    weights = rates * (1 - rates) + 0.01
    expected = weights / weights.sum()
    draws = 20_000
    found = np.bincount([sampler.draw(1)[0] for _ in range(draws)], minlength=count) / draws
    assert np.ptp(expected) > 0.05 and np.abs(found - expected).max() < 5 * np.sqrt(expected.max() / draws)


def test_the_built_in_sampler_goes_on_from_its_state(dataset):
    first, second = (PassRateSampler(dataset, batch_size=4, seed=seed) for seed in (1, 2))
    for _ in range(3):
        rows = np.array(first.draw(4))
        assert len(set(rows.tolist())) == 4
        first.update(rows, np.array([0.0, 0.5, 1.0, 1.0]))
    second.load_state_dict(first.state_dict())
    assert [second.draw(4) for _ in range(5)] == [first.draw(4) for _ in range(5)]


@pytest.mark.parametrize(("name", "value"), [("floor", 0.0), ("momentum", 1.0), ("start", 1.5)])
def test_settings_out_of_range_are_named(dataset, name, value):
    error = refused(ConfigError, lambda: loaded(dataset, None, "PassRateSampler", **{name: value}))
    assert error.field == f"data.sampler.kwargs.{name}"


def test_batches_are_drawn_in_turn_and_the_sampler_hears_of_each_prompt(dataset, own):
    sampler = loaded(dataset, own, "Own", start=5)
    batches = DrawnBatches(dataset, 3, sampler)
    first = batches.batch(0)
    index = first.non_tensor_batch["index"]
    assert index.tolist() == [15, 16, 17]
    assert first.non_tensor_batch["uid"].tolist() == [f"0-{number}" for number in index]
    answered = DataProto.concat([first.select((), ("index",))] * 2)
    scores = torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 0.0])
    batches.observe(DataProto({"scores": scores}, answered.non_tensor_batch))
    assert sampler.told == [([5, 6, 7], [0.5, 1.0, 0.25])]
    state = batches.state_dict()
    again = DrawnBatches(dataset, 3, loaded(dataset, own, "Own"))
    again.load_state_dict(state)
    second, same = (made.batch(1).non_tensor_batch["uid"].tolist() for made in (batches, again))
    assert same == second


def test_prompts_are_recalled_by_their_uids(dataset):
    epochs = [dataset.batch([1, 4, 2], uid_prefix=prefix) for prefix in ("0", "3")]
    uids = [epochs[1].non_tensor_batch["uid"][2], epochs[0].non_tensor_batch["uid"][0]]
    found = dataset.recall(uids)
    assert found.non_tensor_batch["uid"].tolist() == uids
    expected = DataProto.concat([epochs[1][[2]], epochs[0][[0]]])
    assert found.ragged("prompts").equal(expected.ragged("prompts"))
    truths = [table.non_tensor_batch["ground_truth"].tolist() for table in (found, expected)]
    assert truths[0] == truths[1]
    assert [record["data_source"] for record in dataset.records([0, 2])] == ["arithmetic"] * 2


def test_what_is_no_sampler_is_refused(dataset, own):
    assert "Own" in str(refused(ConfigError, lambda: loaded(dataset, own, "Owm")).expected)
    error = refused(ConfigError, lambda: loaded(dataset, own, "Deaf"))
    assert "update, state_dict, load_state_dict" in str(error.got)
    error = refused(ConfigError, lambda: loaded(dataset, own, "Own", begin=1))
    assert error.field == "data.sampler.kwargs"
    batches = DrawnBatches(dataset, 4, loaded(dataset, own, "Twice"))
    error = refused(DataError, lambda: batches.batch(0), "different rows")
    assert "4 rows, 1 different, 3 to 3" in str(error.got)
