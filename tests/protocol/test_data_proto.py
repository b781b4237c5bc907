from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged
from tests.support.refusing import refused


def table(rows, seed=0):
    """Return a table with all kinds of columns.

    Two ragged columns share their offsets and a third has its own. Dense columns have one and two dimensions.
    One column is an object array.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths, others = torch.randint(0, 5, (2, rows), generator=generator)
    tokens = Ragged.from_lengths(torch.randint(0, 99, (int(lengths.sum()),), generator=generator), lengths)
    columns = {
        "tokens": tokens,
        "log_probs": tokens.with_values(torch.randn(len(tokens.values), generator=generator)),
        "prompts": Ragged.from_lengths(torch.arange(int(others.sum())), others),
        "score": torch.randn(rows, generator=generator),
        "pair": torch.randn(rows, 2, generator=generator),
    }
    return DataProto(columns, {"uid": [f"{seed}/{row}" for row in range(rows)]}, {"seed": seed})


def listed(*parts):
    return [
        {
            **{n: (c.row(i) if isinstance(c, Ragged) else c[i]).tolist() for n, c in part.batch.items()},
            **{n: a[i] for n, a in part.non_tensor_batch.items()},
        }
        for part in parts
        for i in range(len(part))
    ]


@given(rows=st.integers(0, 9), chunks=st.integers(1, 12), size=st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_chunk_and_split(rows, chunks, size):
    batch = table(rows)
    expected = listed(batch)
    parts, pieces = batch.chunk(chunks), batch.split(size)
    assert [len(p) for p in parts] == [len(part) for part in np.array_split(np.arange(rows), chunks)]
    assert [len(p) for p in pieces] == [len(expected[i : i + size]) for i in range(0, rows, size)]
    assert listed(*parts) == listed(*pieces) == listed(DataProto.concat(parts)) == expected
    assert all(part.columns == batch.columns and part.meta_info == {"seed": 0} for part in parts + pieces)
    for part in parts:
        assert part.ragged("tokens").offsets is part.ragged("log_probs").offsets
        Ragged(part.ragged("prompts").values, part.ragged("prompts").offsets)  # the offsets match the values


def test_parts_are_views_with_their_own_columns():
    batch = table(6)
    first, second = batch.chunk(2)
    second.ragged("tokens").values[:] = -1
    second.dense("score")[:] = -1
    assert (batch[3:].ragged("tokens").values == -1).all() and batch.dense("score")[3:].tolist() == [-1] * 3
    first.pop(["score"])
    first.meta_info["seed"] = 7
    assert "score" in second and second.meta_info == {"seed": 0}


@given(rows=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_rows_reorder_repeat_filter(rows, seed):
    batch = table(rows, seed)
    expected = listed(batch)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert listed(batch.reorder(order)) == [expected[i] for i in order.tolist()]
    assert listed(batch.reorder(order).reorder(order.argsort())) == expected
    assert listed(batch.repeat(2)) == [row for row in expected for _ in range(2)]
    assert listed(batch.repeat(2, interleave=False)) == expected * 2
    assert listed(batch.filter(np.arange(rows) % 3 == 0)) == expected[::3]
    assert listed(batch[-1]) == expected[-1:] and listed(batch[::2]) == expected[::2]
    if rows > 1:
        refused(DataError, lambda: batch.reorder([0] * rows), "permutation")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_gather_is_concat_then_rows(sizes, data):
    parts = [table(size, seed).select(meta_info_keys=()) for seed, size in enumerate(sizes)]
    whole = listed(*parts)
    assert listed(DataProto.concat(parts)) == whole
    order = data.draw(st.permutations(range(len(whole))))[: data.draw(st.integers(0, 9))]
    found = DataProto.gather(parts, np.array(order, dtype=np.int64))
    assert listed(found) == [whole[i] for i in order]
    stop = data.draw(st.integers(0, len(whole)))
    start = data.draw(st.integers(0, stop))
    assert listed(DataProto.gather(parts, range(start, stop))) == whole[start:stop]


def test_wide_dense_rows_are_gathered_run_by_run():
    values, order = torch.randn(9, 700), np.array([8, 0, 1, 2, 7, 3])
    parts = [DataProto({"x": values[:5]}), DataProto({"x": values[5:]})]
    assert torch.equal(DataProto.gather(parts, order).dense("x"), values[torch.from_numpy(order)])


def test_what_does_not_fit_together():
    dense, ragged = DataProto({"x": torch.zeros(1)}), DataProto({"x": Ragged.from_list([[1]])})
    for parts, telling in (
        ([], "nothing"),
        ([table(2), table(2).select(["score"])], "different columns"),
        ([dense, ragged], "x"),
        ([ragged, dense], "x"),
    ):
        with pytest.raises(DataError, match=telling):
            DataProto.concat(parts)
    error = refused(DataError, lambda: DataProto({"x": torch.zeros(2), "y": torch.zeros(3)}))
    assert error.field == "y" and "3" in str(error.got) and "'x'" in str(error.expected)


def test_concat_puts_meta_info_together_and_refuses_two_values_of_one_name():
    def part(**meta):
        return DataProto({"x": torch.zeros(1)}, meta_info=meta)

    scale = np.array([1.0, np.nan])
    parts = [part(step=1, scale=scale), part(step=1, lr=0.5), part(scale=scale.copy())]
    assert DataProto.concat(parts).meta_info.keys() == {"step", "lr", "scale"}
    for wrong in (part(step=2), part(lr=0.1)):
        with pytest.raises(DataError) as refused:
            DataProto.concat([*parts, wrong])
        assert refused.value.field in wrong.meta_info and refused.value.got != refused.value.expected


def test_select_pop_rename():
    batch = table(3)
    assert batch.select(["score"], []).columns == ("score",)
    popped = batch.pop(["score"], ["uid"], ["seed"])
    assert popped.columns == ("score", "uid") and popped.meta_info == {"seed": 0}
    assert batch.columns == ("tokens", "log_probs", "prompts", "pair")
    assert batch.rename("pair", "two").columns[-1] == "two"
    for wrong, name in (
        (lambda: batch.select(["nothere"]), "nothere"),
        (lambda: batch.rename("nothere", "x"), "nothere"),
        (lambda: batch.dense("tokens"), "tokens"),
    ):
        with pytest.raises(DataError, match=name):
            wrong()


def test_save_and_load(tmp_path):
    batch = table(4)
    batch.save(tmp_path / "batch.pt")
    back = DataProto.load(tmp_path / "batch.pt")
    assert listed(back) == listed(batch) and back.meta_info == batch.meta_info


def test_union():
    batch = table(4)
    other = batch.select(["tokens"], ["uid"]).rename("tokens", "more").union(DataProto(meta_info={"k": 1}))
    both = batch.union(other)
    assert set(both.columns) == {*batch.columns, "more"} and both.meta_info == {"seed": 0, "k": 1}
    assert batch.union(batch.clone()).columns == batch.columns
    prompts = batch.ragged("prompts")
    for wrong in (
        DataProto({"score": batch.dense("score") + 1}),
        DataProto({"prompts": prompts.with_values(prompts.values + 1)}),
        DataProto({"tokens": torch.zeros(4)}),
        DataProto({}, {"uid": ["a"] * 4}),
        DataProto(meta_info={"seed": 5}),
        DataProto({"z": torch.zeros(3)}),
    ):
        with pytest.raises(DataError):
            batch.union(wrong)


def test_union_does_not_read_columns_that_lie_on_the_same_memory(monkeypatch):
    values = torch.randn(3)
    batch = DataProto({"x": values})
    monkeypatch.setattr(torch, "equal", lambda a, b: pytest.fail("values on the same memory were read"))
    assert batch.union(DataProto({"x": values[:]})).columns == ("x",)


@dataclass
class Image:
    name: str
    pixels: np.ndarray


class Undecided:
    """An object whose comparison gives an array instead of a bool, like the tables of some libraries."""

    def __eq__(self, other):
        return np.array([True, True])

    __hash__ = None


def nested(count=3, **others):
    scores = {"scores": np.array([1.0, np.nan]), "names": ["a", "b"], "deep": {"ids": np.arange(count)}}
    return scores | others


EQUAL = [
    lambda: np.array([1, 2]), lambda: np.array([1.0, np.nan]), lambda: float("nan"), nested,
    lambda: [nested()], lambda: torch.tensor([1.0, torch.nan]), lambda: Image("a", np.zeros(2)),
]  # fmt: skip
DIFFERENT = [
    (np.array([1, 2]), np.array([1, 3])), (np.array([1, 2]), np.array([1, 2, 3])),
    (np.array([1.0, np.nan]), np.array([np.nan, 1.0])), (np.array([1]), [1]), (nested(), nested(4)),
    (nested(), nested(more=1)), ((1, 2), [1, 2]), (float("nan"), 1.0), (torch.tensor([1.0]), 1.0),
    (Image("a", np.zeros(2)), Image("a", np.ones(2))), (Image("a", np.zeros(2)), Image("b", np.zeros(2))),
    (Undecided(), Undecided()),
]  # fmt: skip


def objects(element):
    return DataProto({}, {"info": ["x", element]})


@pytest.mark.parametrize("made", EQUAL)
def test_equal_objects_unite_whatever_they_hold(made):
    assert objects(made()).union(objects(made())).columns == ("info",)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_objects_are_refused_by_name(one, other):
    for a, b in ((one, other), (other, one)):
        with pytest.raises(DataError) as refused:
            objects(a).union(objects(b))
        assert refused.value.field == "info"


def test_columns_with_equal_nans_unite():
    def columns(*numbers):
        values = torch.tensor(numbers)
        return DataProto({"dense": values, "ragged": Ragged.from_lengths(values, [1, 0, 2])})

    holed = columns(1.0, torch.nan, 3.0)
    assert holed.union(columns(1.0, torch.nan, 3.0)).columns == ("dense", "ragged")
    refused(DataError, lambda: holed.union(columns(1.0, torch.nan, torch.nan)))
