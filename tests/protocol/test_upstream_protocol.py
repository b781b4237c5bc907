"""Expectations of verl 0.9.1's test_protocol_on_cpu.py that also hold here. See docs/verl-tests.md."""

import pickle

import numpy as np
import pytest
import torch

from tandem.errors import DataError
from tandem.protocol import DataProto
from tests.support.refusing import refused

NAMED = {"name": "abdce"}


def lettered(count, **meta):
    """Return a table with rows 1 to `count`, called a, b, c and so on."""
    letters = [chr(ord("a") + i) for i in range(count)]
    return DataProto.from_dict({"obs": torch.arange(1, count + 1)}, {"labels": letters}, meta or NAMED)


def read(table):
    return table.dense("obs").tolist(), "".join(table.non_tensor_batch["labels"])


def test_rows_in_another_order_and_through_a_file(tmp_path):
    table = lettered(6).reorder(torch.tensor([3, 4, 2, 0, 1, 5]))
    table.save(tmp_path / "table.pt")
    for each in (table, DataProto.load(tmp_path / "table.pt")):
        assert read(each) == ([4, 5, 3, 1, 2, 6], "decabf") and each.meta_info == NAMED


METRICS = [{"loss": 0.5, "accuracy": 0.9}, {"loss": 0.6, "accuracy": 0.85}]
LISTS = {"metrics": {"loss": [0.5, 0.6], "accuracy": [0.9, 0.85]}}
ALONE = ("config", "extra_key", "another_key")
META = {
    "metrics of every table": ([{"metrics": [m], "flag": True} for m in METRICS], LISTS | {"flag": True}),
    "metrics as one dict for each table": ([{"metrics": m} for m in METRICS], LISTS),
    "metrics of one table only": (
        [{"metrics": [{"loss": 0.5}], "flag": 1}, {"flag": 1}],
        {"metrics": {"loss": [0.5]}, "flag": 1},
    ),
    "metrics that the first table lacks": (
        [{"flag": 1}, {"metrics": {"loss": 0.6}, "flag": 1}, {"metrics": {"loss": 0.55}, "flag": 1}],
        {"metrics": {"loss": [0.6, 0.55]}, "flag": 1},
    ),
    "facts of both": ([{"single_value": 42}] * 2, {"single_value": 42}),
    "facts of one table each": (
        [{name: name.upper(), "shared_key": "X"} for name in ALONE],
        {**{name: name.upper() for name in ALONE}, "shared_key": "X"},
    ),
    "facts that differ": ([{"config": "A"}, {"config": "B"}], "config"),
    "metrics that are no dict": ([{"metrics": [0.5]}, {}], "metrics"),
}


@pytest.mark.parametrize("case", META)
def test_facts_and_metrics_of_concatenated_tables(case):
    metas, wanted = META[case]
    parts = [DataProto.from_dict({"obs": torch.tensor([i])}, None, meta) for i, meta in enumerate(metas)]
    if isinstance(wanted, str):
        refused(DataError, lambda: DataProto.concat(parts), wanted)
        return
    whole = DataProto.concat(parts)
    assert whole.dense("obs").tolist() == list(range(len(metas))) and whole.meta_info == wanted


def test_metrics_put_together_twice_stay_one_list_each():
    first = DataProto.concat([lettered(1, metrics={"loss": 0.5}), lettered(1, metrics={"loss": 0.6})])
    again = DataProto.concat([first, lettered(1, metrics={"loss": 0.55})])
    assert again.meta_info == {"metrics": {"loss": [0.5, 0.6, 0.55]}}
    assert first[1:].meta_info == first.meta_info


@pytest.mark.parametrize(("times", "interleave", "letters"), [
    *((2, True, "aabbcc"), (2, False, "abcabc"), ([3, 1, 2], True, "aaabcc")),
    (torch.tensor([1, 2, 3]), True, "abbccc"),
])  # fmt: skip
def test_rows_repeated(times, interleave, letters):
    table = lettered(3).repeat(repeat_times=times, interleave=interleave)
    assert read(table) == ([" abc".index(letter) for letter in letters], letters) and table.meta_info == NAMED


def test_how_many_rows_and_what_is_popped_is_gone():
    labels = np.array(["a", "b", "c"], dtype=object)
    assert len(lettered(3)) == len(DataProto(None, {"labels": labels}, NAMED)) == 3
    assert len(DataProto(None, {}, NAMED)) == len(DataProto(None, None, NAMED)) == 0
    columns, meta = {"obs": torch.randn(9, 4), "act": torch.randn(9, 3)}, {"2": 2, "1": 1}
    table = DataProto.from_dict(columns, meta_info=meta)
    popped = table.pop(batch_keys=["obs"], meta_info_keys=["2"])
    assert (popped.batch.keys(), popped.meta_info.keys()) == ({"obs"}, {"2"})
    assert (table.batch.keys(), table.meta_info.keys()) == ({"act"}, {"1"})


def test_rows_by_number_and_by_mask_of_every_kind():
    draw = np.random.default_rng()
    table = DataProto.from_dict({"obs": torch.randn(100, 10)}, {"labels": draw.choice(["abc", "cde"], 100)})
    for rows in (draw.integers(0, 100, 10), draw.random(100) < 0.5):
        for kind in (rows, torch.from_numpy(rows), rows.tolist(), list(rows)):
            found = table[kind]
            assert torch.equal(found.dense("obs"), table.dense("obs")[torch.from_numpy(rows)])
            labels = found.non_tensor_batch["labels"].tolist()
            assert labels == table.non_tensor_batch["labels"][rows].tolist()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_chosen_can_be_divided(kind):
    for rows in ([True, False, True, False], [0, 2]):
        assert [read(part) for part in lettered(4)[kind(rows)].chunk(2)] == [([1], "a"), ([3], "c")]


def test_a_subclass_stays_one():
    class Own(DataProto):
        pass

    made = Own.from_single_dict({"x": torch.tensor([0]), "y": ["text"]}, meta_info=NAMED)
    assert type(made) is Own
    assert (list(made.batch), list(made.non_tensor_batch), made.meta_info) == (["x"], ["y"], NAMED)


def test_without_tensors():
    table = DataProto.from_dict(non_tensors={"labels": ["a", "b", "c"]}, meta_info=NAMED)
    for take in (table.select, table.pop):
        assert take(non_tensor_batch_keys=["labels"]).non_tensor_batch["labels"].tolist() == ["a", "b", "c"]
    assert table.non_tensor_batch == {}


@pytest.mark.parametrize("protocol", [2, 5])
def test_pickled_tensors_of_many_shapes(protocol):
    one, two = torch.randn(3, 4, 5), torch.randint(0, 10, (3, 2))
    nested = [torch.randn(2, 3), torch.randn(3, 4), torch.randn(1, 5)]
    back = pickle.loads(pickle.dumps(DataProto({"one": one, "two": two}, {"nested": nested}), protocol))
    assert back.dense("two").dtype == two.dtype and back.dense("one").device == one.device
    found = [back.dense("one"), back.dense("two"), *back.non_tensor_batch["nested"]]
    assert all(torch.equal(a, b) for a, b in zip(found, [one, two, *nested], strict=True))


def test_columns_that_are_equal_go_together_whosever_memory_they_lie_in():
    obs, deep = torch.randn(9, 3), np.arange(24).reshape(2, 3, 4)
    assert torch.equal(DataProto({"obs": obs}).union(DataProto({"obs": obs.clone()})).dense("obs"), obs)
    holed = np.array([1.0, np.nan, 3.0])
    mixed = np.array([1, "hello", np.array([2, 3])], dtype=object)
    for column, other in ((deep, deep + 1), (holed, np.array([np.nan, 1.0, 3.0])), (mixed, mixed[::-1])):
        table = DataProto(None, {"data": column})
        table.union(DataProto(None, {"data": column.copy()}))
        with pytest.raises(DataError, match="data"):
            table.union(DataProto(None, {"data": other}))
