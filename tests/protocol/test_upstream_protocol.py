"""Expectations of verl 0.9.1's test_protocol_on_cpu.py that also hold for Tandem's DataProto.

docs/verl-tests.md lists those that do not hold, and why.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.errors import DataError
from tandem.protocol import DataProto

NAMED = {"name": "abdce"}


def lettered(count: int, **meta: Any) -> DataProto:
    """Return a table with rows 1 to `count`, called a, b, c and so on."""
    letters = [chr(ord("a") + i) for i in range(count)]
    return DataProto.from_dict({"obs": torch.arange(1, count + 1)}, {"labels": letters}, meta or NAMED)


def read(table: DataProto) -> tuple[list[int], str]:
    return table.dense("obs").tolist(), "".join(table.non_tensor_batch["labels"])


def pickled(table: DataProto, protocol: int = pickle.HIGHEST_PROTOCOL) -> DataProto:
    back: DataProto = pickle.loads(pickle.dumps(table, protocol=protocol))
    return back


def test_rows_in_another_order() -> None:
    table = lettered(6).reorder(torch.tensor([3, 4, 2, 0, 1, 5]))
    assert read(table) == ([4, 5, 3, 1, 2, 6], "decabf")
    assert table.meta_info == NAMED


def concatenated(*metas: dict[str, Any]) -> dict[str, Any]:
    parts = [
        DataProto.from_dict({"obs": torch.tensor([2 * i, 2 * i + 1])}, None, m) for i, m in enumerate(metas)
    ]
    whole = DataProto.concat(parts)
    assert whole.dense("obs").tolist() == list(range(2 * len(metas)))
    return whole.meta_info


def test_metrics_of_three_tables() -> None:
    losses, accuracies = [0.5, 0.6, 0.55], [0.9, 0.85, 0.88]
    metas = [
        {"metrics": [{"loss": loss, "accuracy": accuracy}], "config_flag": True}
        for loss, accuracy in zip(losses, accuracies, strict=True)
    ]
    wanted = {"metrics": {"loss": losses, "accuracy": accuracies}, "config_flag": True}
    assert concatenated(*metas) == wanted


def test_metrics_of_one_table_only_and_facts_of_both() -> None:
    found = concatenated({"metrics": [{"loss": 0.5}], "flag": True}, {"flag": True})
    assert found == {"metrics": {"loss": [0.5]}, "flag": True}
    assert concatenated({"single_value": 42}, {"single_value": 42}) == {"single_value": 42}


def test_metrics_that_the_first_table_lacks() -> None:
    found = concatenated(
        {"flag": 1}, {"metrics": {"loss": 0.6}, "flag": 1}, {"metrics": {"loss": 0.55}, "flag": 1}
    )
    assert found == {"metrics": {"loss": [0.6, 0.55]}, "flag": 1}


def test_metrics_as_one_dict_for_each_table() -> None:
    found = concatenated(*({"metrics": {"loss": x, "accuracy": y}} for x, y in ((0.5, 0.9), (0.6, 0.85))))
    assert found == {"metrics": {"loss": [0.5, 0.6], "accuracy": [0.9, 0.85]}}


def test_metrics_put_together_twice_stay_one_list_each() -> None:
    first = DataProto.concat([lettered(1, metrics={"loss": 0.5}), lettered(1, metrics={"loss": 0.6})])
    again = DataProto.concat([first, lettered(1, metrics={"loss": 0.55})])
    assert again.meta_info == {"metrics": {"loss": [0.5, 0.6, 0.55]}}
    assert first[1:].meta_info == first.meta_info
    with pytest.raises(DataError, match="metrics"):
        concatenated({"metrics": [0.5]}, {})


def test_facts_of_one_table_each() -> None:
    alone = ("config", "extra_key", "another_key")
    found = concatenated(*({name: name.upper(), "shared_key": "X"} for name in alone))
    assert found == {**{name: name.upper() for name in alone}, "shared_key": "X"}


def test_facts_that_differ() -> None:
    with pytest.raises(DataError, match="config"):
        concatenated({"config": "A"}, {"config": "B"})


def test_what_is_popped_is_gone() -> None:
    table = DataProto.from_dict(
        {"obs": torch.randn(9, 4), "act": torch.randn(9, 3)}, meta_info={"2": 2, "1": 1}
    )
    popped = table.pop(batch_keys=["obs"], meta_info_keys=["2"])
    assert (popped.batch.keys(), popped.meta_info.keys()) == ({"obs"}, {"2"})
    assert (table.batch.keys(), table.meta_info.keys()) == ({"act"}, {"1"})


@pytest.mark.parametrize(
    ("times", "interleave", "letters"),
    [
        (2, True, "aabbcc"),
        (2, False, "abcabc"),
        ([3, 1, 2], True, "aaabcc"),
        (torch.tensor([1, 2, 3]), True, "abbccc"),
    ],
)
def test_rows_repeated(times: Any, interleave: bool, letters: str) -> None:
    table = lettered(3).repeat(repeat_times=times, interleave=interleave)
    assert read(table) == ([" abc".index(letter) for letter in letters], letters)
    assert table.meta_info == NAMED


def test_through_a_file(tmp_path: Path) -> None:
    lettered(3).save(tmp_path / "table.pt")
    loaded = DataProto.load(tmp_path / "table.pt")
    assert read(loaded) == ([1, 2, 3], "abc")
    assert loaded.meta_info == NAMED


def test_how_many_rows() -> None:
    labels = np.array(["a", "b", "c"], dtype=object)
    assert len(lettered(3)) == 3
    assert len(DataProto(None, {"labels": labels}, NAMED)) == 3
    assert len(DataProto(None, {}, NAMED)) == len(DataProto(None, None, NAMED)) == 0


def test_rows_by_number_and_by_mask_of_every_kind() -> None:
    draw = np.random.default_rng()
    table = DataProto.from_dict({"obs": torch.randn(100, 10)}, {"labels": draw.choice(["abc", "cde"], 100)})
    numbers, mask = draw.integers(0, 100, 10), draw.random(100) < 0.5
    for rows in (numbers, mask):
        kinds: list[Any] = [rows, torch.from_numpy(rows), rows.tolist(), list(rows)]
        for kind in kinds:
            found = table[kind]
            assert torch.equal(found.dense("obs"), table.dense("obs")[torch.from_numpy(rows)])
            labels = found.non_tensor_batch["labels"].tolist()
            assert labels == table.non_tensor_batch["labels"][rows].tolist()


@pytest.mark.parametrize("rows", [[True, False, True, False], [0, 2]])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_chosen_can_be_divided(rows: list[Any], kind: Any) -> None:
    chosen = lettered(4)[kind(rows)]
    assert len(chosen) == 2
    assert [read(part) for part in chosen.chunk(2)] == [([1], "a"), ([3], "c")]


def test_a_subclass_stays_one() -> None:
    class Own(DataProto):
        pass

    made = Own.from_single_dict({"x": torch.tensor([0]), "y": ["text"]}, meta_info=NAMED)
    assert type(made) is Own
    assert (list(made.batch), list(made.non_tensor_batch), made.meta_info) == (["x"], ["y"], NAMED)


def test_without_tensors() -> None:
    table = DataProto.from_dict(non_tensors={"labels": ["a", "b", "c"]}, meta_info=NAMED)
    assert table.select(non_tensor_batch_keys=["labels"]).non_tensor_batch["labels"].tolist() == [
        "a",
        "b",
        "c",
    ]
    assert table.pop(non_tensor_batch_keys=["labels"]).non_tensor_batch["labels"].tolist() == ["a", "b", "c"]
    assert table.non_tensor_batch == {}


def all_types() -> dict[str, Tensor]:
    return {
        "float": torch.randn(2, 3),
        "double": torch.randn(2, 3).double(),
        "int": torch.randint(0, 10, (2, 3)).int(),
        "long": torch.randint(0, 10, (2, 3)),
        "bool": torch.tensor([[True, False], [False, True]]),
        "bfloat16": torch.randn(2, 3).bfloat16(),
        "fp8": torch.randn(2, 3).to(torch.float8_e5m2),
    }


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(
    "columns",
    [
        {"one": torch.randn(3, 4, 5)},
        {"two": torch.randn(5, 3, 4), "three": torch.randint(0, 10, (5, 3, 2))},
        all_types(),
        {"on": torch.randn(2, 3, 4, device="cpu")},
    ],
    ids=["one tensor", "several", "all types", "on a device"],
)
def test_pickled_tensors(columns: dict[str, Tensor], protocol: int) -> None:
    back = pickled(DataProto(columns), protocol).batch
    assert back.keys() == columns.keys()
    for name, column in columns.items():
        found = back[name]
        assert isinstance(found, Tensor)
        assert (found.dtype, found.shape, found.device) == (column.dtype, column.shape, column.device)
        assert torch.equal(found.double(), column.double())


def test_pickled_tensors_of_many_shapes() -> None:
    tensors = [torch.randn(2, 3), torch.randn(3, 4), torch.randn(1, 5)]
    back = pickled(DataProto({"regular": torch.randn(3, 4, 5)}, {"nested": tensors}))
    found = back.non_tensor_batch["nested"]
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))


def test_columns_that_are_equal_go_together_whosever_memory_they_lie_in() -> None:
    """A union accepts equal columns in different memory, even a copy of a tensor, which verl refuses."""
    obs, deep = torch.randn(9, 3), np.arange(24).reshape(2, 3, 4)
    assert torch.equal(DataProto({"obs": obs}).union(DataProto({"obs": obs.clone()})).dense("obs"), obs)
    holed = np.array([1.0, np.nan, 3.0])
    mixed = np.array([1, "hello", np.array([2, 3])], dtype=object)
    for column, other in ((deep, deep + 1), (holed, np.array([np.nan, 1.0, 3.0])), (mixed, mixed[::-1])):
        table = DataProto(None, {"data": column})
        table.union(DataProto(None, {"data": column.copy()}))
        with pytest.raises(DataError, match="data"):
            table.union(DataProto(None, {"data": other}))
