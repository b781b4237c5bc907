from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged


def table(rows: int, seed: int = 0) -> DataProto:
    """Return a table with all kinds of columns.

    Two ragged columns share their offsets and a third has its own. Dense columns have one and two dimensions.
    One column is an object array.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths, others = torch.randint(0, 5, (2, rows), generator=generator)
    tokens = Ragged.from_lengths(torch.randint(0, 99, (int(lengths.sum()),), generator=generator), lengths)
    return DataProto(
        {
            "tokens": tokens,
            "log_probs": tokens.with_values(torch.randn(len(tokens.values), generator=generator)),
            "prompts": Ragged.from_lengths(torch.arange(int(others.sum())), others),
            "score": torch.randn(rows, generator=generator),
            "pair": torch.randn(rows, 2, generator=generator),
        },
        {"uid": [f"{seed}/{row}" for row in range(rows)]},
        {"seed": seed},
    )


def listed(batch: DataProto) -> list[dict[str, Any]]:
    """Return the rows as plain lists."""
    return [
        {
            **{n: (c.row(i) if isinstance(c, Ragged) else c[i]).tolist() for n, c in batch.batch.items()},
            **{n: a[i] for n, a in batch.non_tensor_batch.items()},
        }
        for i in range(len(batch))
    ]


def joined(parts: list[DataProto]) -> list[dict[str, Any]]:
    return [row for part in parts for row in listed(part)]


@given(rows=st.integers(0, 9), chunks=st.integers(1, 12), size=st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_chunk_and_split(rows, chunks, size):
    batch = table(rows)
    expected = listed(batch)
    parts = batch.chunk(chunks)
    assert len(parts) == chunks
    assert [len(p) for p in parts] == [len(part) for part in np.array_split(np.arange(rows), chunks)]
    assert joined(parts) == expected
    pieces = batch.split(size)
    assert [len(p) for p in pieces] == [len(expected[i : i + size]) for i in range(0, rows, size)]
    assert joined(pieces) == expected
    assert all(part.columns == batch.columns and part.meta_info == {"seed": 0} for part in parts + pieces)
    for part in parts:
        assert part.ragged("tokens").offsets is part.ragged("log_probs").offsets
        Ragged(part.ragged("prompts").values, part.ragged("prompts").offsets)  # the offsets match the values
    assert listed(DataProto.concat(parts)) == expected


def test_parts_are_views_with_their_own_columns():
    batch = table(6)
    first, second = batch.chunk(2)
    second.ragged("tokens").values[:] = -1
    second.dense("score")[:] = -1
    assert (batch[3:].ragged("tokens").values == -1).all()
    assert batch.dense("score")[3:].tolist() == [-1] * 3
    first.pop(["score"])
    first.meta_info["seed"] = 7
    assert "score" in second
    assert second.meta_info == {"seed": 0}


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
    mask = np.arange(rows) % 3 == 0
    assert listed(batch.filter(mask)) == expected[::3]
    assert listed(batch[-1]) == expected[-1:]
    assert listed(batch[::2]) == expected[::2]
    if rows > 1:
        with pytest.raises(DataError, match="permutation"):
            batch.reorder([0] * rows)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_gather_is_concat_then_rows(sizes, data):
    parts = [table(size, seed).select(meta_info_keys=()) for seed, size in enumerate(sizes)]
    whole = joined(parts)
    assert listed(DataProto.concat(parts)) == whole
    order = np.array(data.draw(st.permutations(range(len(whole)))), dtype=np.int64)[
        : data.draw(st.integers(0, 9))
    ]
    assert listed(DataProto.gather(parts, order)) == [whole[i] for i in order]
    stop = data.draw(st.integers(0, len(whole)))
    start = data.draw(st.integers(0, stop))
    assert listed(DataProto.gather(parts, range(start, stop))) == whole[start:stop]


def test_wide_dense_rows_are_gathered_run_by_run():
    parts = [DataProto({"x": torch.randn(5, 700)}), DataProto({"x": torch.randn(4, 700)})]
    order = np.array([8, 0, 1, 2, 7, 3])
    expected = torch.cat([part.dense("x") for part in parts])[torch.from_numpy(order)]
    assert torch.equal(DataProto.gather(parts, order).dense("x"), expected)


def test_concat_of_what_does_not_fit():
    with pytest.raises(DataError, match="nothing"):
        DataProto.concat([])
    with pytest.raises(DataError, match="different columns"):
        DataProto.concat([table(2), table(2).select(["score"])])
    dense, ragged = DataProto({"x": torch.zeros(1)}), DataProto({"x": Ragged.from_list([[1]])})
    for mixed in ([dense, ragged], [ragged, dense]):
        with pytest.raises(DataError, match="x"):
            DataProto.concat(mixed)


def test_concat_puts_meta_info_together_and_refuses_two_values_of_one_name():
    def part(**meta: Any) -> DataProto:
        return DataProto({"x": torch.zeros(1)}, meta_info=meta)

    nan = {"scale": np.array([1.0, np.nan])}
    parts = [part(step=1, **nan), part(step=1, lr=0.5), part(**{"scale": nan["scale"].copy()})]
    assert DataProto.concat(parts).meta_info.keys() == {"step", "lr", "scale"}
    for wrong in (part(step=2), part(lr=0.1)):
        with pytest.raises(DataError) as refused:
            DataProto.concat([*parts, wrong])
        assert refused.value.field in wrong.meta_info
        assert refused.value.got != refused.value.expected


def test_union():
    batch = table(4)
    other = batch.select(["tokens"], ["uid"]).rename("tokens", "more").union(DataProto(meta_info={"k": 1}))
    both = batch.union(other)
    assert set(both.columns) == {*batch.columns, "more"}
    assert both.meta_info == {"seed": 0, "k": 1}
    copies = DataProto(
        {"score": batch.dense("score").clone(), "prompts": batch.clone().ragged("prompts")},
        {"uid": list(batch.non_tensor_batch["uid"])},
    )
    assert batch.union(copies).columns == batch.columns
    for wrong in (
        DataProto({"score": batch.dense("score") + 1}),
        DataProto({"prompts": batch.ragged("prompts").with_values(batch.ragged("prompts").values + 1)}),
        DataProto({"tokens": torch.zeros(4)}),
        DataProto({}, {"uid": ["a"] * 4}),
        DataProto(meta_info={"seed": 5}),
    ):
        with pytest.raises(DataError, match="different values under one name"):
            batch.union(wrong)
    with pytest.raises(DataError, match="3 rows"):
        batch.union(DataProto({"z": torch.zeros(3)}))


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

    def __eq__(self, other: object) -> Any:
        return np.array([True, True])

    __hash__ = None  # type: ignore[assignment]


def test_union_of_objects_that_hold_arrays():
    batch = DataProto({}, {"x": [Image("a", np.zeros(2)), 1]})
    assert batch.union(DataProto({}, {"x": [Image("a", np.zeros(2)), 1]})).columns == ("x",)
    for ours, theirs in (
        (batch, [Image("a", np.ones(2)), 1]),
        (batch, [Image("b", np.zeros(2)), 1]),
        (DataProto({}, {"x": [Undecided()]}), [Undecided()]),
    ):
        with pytest.raises(DataError, match="different values under one name"):
            ours.union(DataProto({}, {"x": theirs}))


def test_select_pop_rename():
    batch = table(3)
    assert batch.select(["score"], []).columns == ("score",)
    popped = batch.pop(["score"], ["uid"], ["seed"])
    assert popped.columns == ("score", "uid")
    assert popped.meta_info == {"seed": 0}
    assert batch.columns == ("tokens", "log_probs", "prompts", "pair")
    assert batch.rename("pair", "two").columns[-1] == "two"
    for wrong in (
        lambda: batch.select(["nothere"]),
        lambda: batch.rename("nothere", "x"),
        lambda: batch.dense("tokens"),
    ):
        with pytest.raises(DataError, match=r"nothere|tokens"):
            wrong()


def test_save_and_load(tmp_path):
    batch = table(4)
    batch.save(tmp_path / "batch.pt")
    back = DataProto.load(tmp_path / "batch.pt")
    assert listed(back) == listed(batch)
    assert back.meta_info == batch.meta_info


def test_columns_that_disagree():
    with pytest.raises(DataError, match=r"y(.|\n)*3 rows(.|\n)*2 rows, as in 'x'"):
        DataProto({"x": torch.zeros(2), "y": torch.zeros(3)})


def objects(*elements: Any) -> DataProto:
    return DataProto({}, {"info": list(elements)})


NESTED = {"scores": np.array([1.0, np.nan]), "names": ["a", "b"], "deep": {"ids": np.arange(3)}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1, 2]), np.array([1, 2])),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan])),
        (float("nan"), float("nan")),
        (NESTED, {"names": ["a", "b"], "deep": {"ids": np.arange(3)}, "scores": np.array([1.0, np.nan])}),
        ([NESTED], [{**NESTED, "deep": {"ids": np.arange(3)}}]),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])),
    ],
)
def test_equal_objects_unite_whatever_they_hold(one: Any, other: Any) -> None:
    assert objects("x", one).union(objects("x", other)).columns == ("info",)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([1, 2]), np.array([1, 2, 3])),
        (np.array([1.0, np.nan]), np.array([np.nan, 1.0])),
        (np.array([1]), [1]),
        (NESTED, {**NESTED, "deep": {"ids": np.arange(4)}}),
        (NESTED, {name: NESTED[name] for name in ("scores", "names")}),
        ((1, 2), [1, 2]),
        (float("nan"), 1.0),
        (torch.tensor([1.0]), 1.0),
    ],
)
def test_different_objects_are_refused_by_name(one: Any, other: Any) -> None:
    for a, b in ((one, other), (other, one)):
        with pytest.raises(DataError, match="different values") as refused:
            objects("x", a).union(objects("x", b))
        assert refused.value.field == "info"


def test_columns_with_equal_nans_unite() -> None:
    values = torch.tensor([1.0, torch.nan, 3.0])
    tables = [
        DataProto({"dense": v, "ragged": Ragged.from_lengths(v, [1, 0, 2])}) for v in (values, values.clone())
    ]
    assert tables[0].union(tables[1]).columns == ("dense", "ragged")
    changed = DataProto({"dense": torch.tensor([1.0, torch.nan, torch.nan])})
    with pytest.raises(DataError, match="different values"):
        tables[0].union(changed)
