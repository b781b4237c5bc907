"""The expectations of verl 0.9.1's test_seqlen_balancing.py that apply here; see docs/verl-tests.md."""

import itertools
import random

import numpy as np
import torch

from tandem.balance import partition, within_budget
from tandem.protocol import DataProto


def test_micro_batches_within_a_budget_are_put_in_order_again():
    table = DataProto.from_single_dict({"ids": torch.randint(0, 10, (20, 100)), "mask": torch.ones(20, 100)})
    lengths = [random.randint(50, 90) for _ in range(20)]
    sets = within_budget(lengths, 300)
    assert max(sum(lengths[i] for i in rows) for rows in sets) <= 300
    back = DataProto.concat([table[rows] for rows in sets]).reorder(
        torch.tensor(list(itertools.chain(*sets))).argsort()
    )
    assert all(torch.equal(back.dense(name), table.dense(name)) for name in ("ids", "mask"))


def test_the_number_of_micro_batches_is_the_quotient_or_one_more():
    """In verl it is the quotient, and a micro-batch may exceed its budget. Here none does."""
    for _ in range(40):
        lengths = [random.randint(50, 90) for _ in range(random.choice([20, 25]))]
        quotient = -(-sum(lengths) // 300)
        assert len(within_budget(lengths, 300)) in (quotient, quotient + 1)
        assert len(within_budget(lengths, 300, at_least=quotient + 2)) == quotient + 2


def test_a_last_part_may_be_smaller():
    labels = np.array([f"label_{i}" for i in range(10)], dtype=object)
    table = DataProto.from_single_dict({"ids": torch.randint(0, 10, (10, 5)), "labels": labels})
    for size, sizes in ((3, [3, 3, 3, 1]), (10, [10]), (15, [10])):
        parts = table.split(size)
        assert [len(part) for part in parts] == sizes
        whole = DataProto.concat(parts)
        assert torch.equal(whole.dense("ids"), table.dense("ids"))
        assert whole.non_tensor_batch["labels"].tolist() == labels.tolist()


def test_samples_alone_are_divided_in_two():
    lengths = [100, 200, 150, 50, 300, 250]
    sets = partition(lengths, 2)
    assert sorted(itertools.chain(*sets)) == list(range(6))
    assert [sum(lengths[i] for i in rows) for rows in sets] in ([550, 500], [525, 525])
