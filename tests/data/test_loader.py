import numpy as np
import pytest

from tandem.data.loader import BatchLoader, BatchOrder, EveryRow, uids
from tandem.data.mixture import EpochOrder
from tandem.errors import DataError
from tandem.protocol import DataProto
from tests.support.refusing import refused


class Numbers:
    """A dataset with rows 0 … n-1."""

    def __init__(self, count):
        self._count = count
        self.digests = np.arange(count, dtype=np.uint64)

    def __len__(self):
        return self._count

    def batch(self, rows, *, uid_prefix):
        return DataProto(non_tensor_batch={"row": list(rows), "uid": uids(uid_prefix, list(rows))})


def loader_of(count, size, *, shuffle, seed):
    return BatchLoader(Numbers(count), size, EpochOrder(shuffle=shuffle, seed=seed))


def rows_of(loader, batches):
    return [loader.next().non_tensor_batch["row"].tolist() for _ in range(batches)]


def test_an_epoch_is_a_permutation_less_the_short_batch():
    loader = loader_of(11, 3, shuffle=True, seed=4)
    assert loader.steps_per_epoch == 3
    epochs = [[row for batch in rows_of(loader, 3) for row in batch] for _ in range(4)]
    assert all(len(set(rows)) == 9 and set(rows) <= set(range(11)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 4 and loader.epoch == 3


def test_the_seed_fixes_the_order_and_without_shuffle_it_is_the_files():
    orders = [rows_of(loader_of(64, 8, shuffle=True, seed=seed), 20) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    loader = loader_of(5, 2, shuffle=False, seed=0)
    assert rows_of(loader, 5) == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


def test_uid_is_unique_over_epochs_and_a_batch_is_a_function_of_its_number():
    loader, fresh = (loader_of(4, 2, shuffle=True, seed=0) for _ in range(2))
    batches = [loader.next().non_tensor_batch["uid"].tolist() for _ in range(6)]
    every = [f"{epoch}-{row}" for epoch in range(3) for row in range(4)]
    assert sorted(uid for batch in batches for uid in batch) == every
    asked = [5, 0, 3, 3, 4]
    found = [fresh.batch(number).non_tensor_batch["uid"].tolist() for number in asked]
    assert found == [batches[number] for number in asked] and fresh.used == 0


@pytest.mark.parametrize("taken", range(9))
def test_resumed_loader_goes_on_exactly(taken):
    whole = rows_of(loader_of(11, 3, shuffle=True, seed=7), 12)
    first = loader_of(11, 3, shuffle=True, seed=7)
    rows_of(first, taken)
    second = loader_of(11, 3, shuffle=True, seed=7)
    rows_of(second, 5)
    second.load_state_dict(first.state_dict())
    assert (second.epoch, second.position) == (first.epoch, first.position)
    assert rows_of(second, 12 - taken) == whole[taken:]


@pytest.mark.parametrize(("rows", "shuffle", "seed", "got"), [
    (7, True, 0, "seed 0, shuffle True, rows 7"),
    (8, False, 0, "seed 0, shuffle False, rows 8"),
    (8, True, 1, "seed 1, shuffle True, rows 8"),
])  # fmt: skip
def test_state_of_another_order_is_refused(rows, shuffle, seed, got):
    state = BatchOrder(8, 2, shuffle=True, seed=0).state_dict()
    whole = {"epoch": 0, "position": 0, "seed": 0, "shuffle": True, "stretches": [[0, 8]]}
    assert state == whole
    order = BatchOrder(rows, 2, seed=seed, shuffle=shuffle)
    error = refused(DataError, lambda: order.load_state_dict(state))
    assert (error.got, error.expected) == (got, "seed 0, shuffle True, rows 8")
    assert order.stretches == ((0, rows),)


@pytest.mark.parametrize("taken", range(8))
def test_rows_that_were_added_join_in_the_next_epoch(taken):
    old, new = loader_of(11, 3, shuffle=True, seed=7), loader_of(16, 3, shuffle=True, seed=7)
    before = rows_of(old, taken)
    new.load_state_dict(old.state_dict())
    after = rows_of(new, 9 - taken % 3)
    begun = -(-taken // 3)  # epochs that started with 11 rows end with 11 rows
    whole = rows_of(loader_of(11, 3, shuffle=True, seed=7), 3 * begun)
    assert (before + after)[: 3 * begun] == whole
    for epoch in (begun, begun + 1):
        places = range(15 * (epoch - begun), 15 * (epoch - begun) + 15)
        flat = [row for batch in (before + after)[3 * begun :] for row in batch]
        there = [flat[place] for place in places if place < len(flat)]
        drawn = np.random.Generator(np.random.PCG64([7, epoch])).permutation(16)
        assert there == drawn[: len(there)].tolist()


def test_data_that_grew_twice_go_on_exactly_in_between():
    first, second, third, again = (loader_of(rows, 2, shuffle=True, seed=1) for rows in (8, 10, 14, 14))
    second.load_state_dict(first.state_dict())
    assert second.stretches == ((0, 10),)  # new rows are there at once before the first step
    rows_of(first, 3)
    second.load_state_dict(first.state_dict())
    rows_of(second, 4)  # the last batch of epoch 0, then three of epoch 1
    third.load_state_dict(second.state_dict())
    assert third.stretches == ((0, 8), (1, 10), (2, 14))
    assert (third.epoch, third.position, third.used) == (1, 6, 7)
    uids = [uid for _ in range(9) for uid in third.next().non_tensor_batch["uid"]]
    assert [uid.split("-")[0] for uid in uids] == ["1"] * 4 + ["2"] * 14
    again.load_state_dict(third.state_dict())
    assert again.state_dict() == third.state_dict()
    batches = [each.batch(2).non_tensor_batch["uid"].tolist() for each in (again, first)]
    assert batches[0] == batches[1] and (again.used, first.used) == (third.used, 3)


@pytest.mark.parametrize(("epoch", "position", "size", "used"), [
    (0, 0, 3, 0), (0, 4, 2, 2), (0, 4, 3, 2), (1, 6, 4, 4), (2, 8, 8, 3), (0, 8, 5, 1),
])  # fmt: skip
def test_another_batch_size_goes_on_at_the_next_batch_that_repeats_no_row(epoch, position, size, used):
    order = BatchOrder(8, size, shuffle=True, seed=1)
    order.load_state_dict({"epoch": epoch, "position": position, "seed": 1, "shuffle": True, "rows": 8})
    assert order.used == used


def test_dataset_smaller_than_a_batch():
    error = refused(DataError, lambda: loader_of(3, 4, shuffle=True, seed=0))
    assert (error.field, error.got) == ("data.train_batch_size", "batch size 4, 3 row(s) of data")


@pytest.mark.parametrize(
    ("size", "expected"), [(2, [[0, 1], [2, 3], [4]]), (None, [[0, 1, 2, 3, 4]]), (9, [[0, 1, 2, 3, 4]])]
)
def test_validation_batches_keep_the_last(size, expected):
    batches = EveryRow(Numbers(5), size)
    assert len(batches) == len(expected)
    for _ in range(2):
        assert [batch.non_tensor_batch["row"].tolist() for batch in batches] == expected
    assert batches[0].non_tensor_batch["uid"][0] == "val-0"
    refused(IndexError, lambda: batches[len(expected)])
