from typing import Any

import numpy as np
import pytest

from tandem.protocol import DataProto
from tandem.runtime import BatchFuture
from tandem.trainer.steps import MiniBatching, Plan, minibatches, updates_per_step

MINI = MiniBatching(samples=8, epochs=2, shuffle=True, seed=1)


@pytest.mark.parametrize(("step", "n"), [(1, 4), (2, 4), (3, 2), (9, 2), (10, 8)])
def test_a_group_size_holds_from_its_step_on(step, n):
    critic = MiniBatching(samples=16, epochs=1, shuffle=False, seed=1)
    sizes = {1: 4, 3: 2, 10: 8}
    plan = Plan(total_steps=12, batch_samples=32, actor=MINI, critic=critic, recompute_old=True, n=4,
                group_sizes=sizes)  # fmt: skip
    there = plan.at(step)
    assert (there.n, there.batch_samples) == (n, 8 * n)
    assert (there.actor.samples, there.critic.samples) == (2 * n, 4 * n)
    assert updates_per_step(there.batch_samples, there.actor) == 2 * 4


class NeverThere:
    """A result that must not be waited for."""

    borrowed = False

    def get(self, timeout_s: float | None = None) -> Any:
        raise AssertionError("waited for a value")

    def index(self, timeout_s: float | None = None) -> Any:
        raise AssertionError("waited for an index")

    wait = get

    def done(self) -> bool:
        return False


def test_mini_batches_are_formed_before_the_batch_is_there():
    mini = MiniBatching(samples=3, epochs=2, shuffle=True, seed=1)
    unseen = BatchFuture.collected([NeverThere()], "compute_advantages")
    assert len(list(minibatches(unseen, 7, mini, step=1))) == 6
    batch = BatchFuture.of(DataProto(non_tensor_batch={"row": list(range(7))}))
    for shuffle in (False, True):
        mini = MiniBatching(samples=3, epochs=2, shuffle=shuffle, seed=1)
        parts = [part.get().non_tensor_batch["row"].tolist() for part in minibatches(batch, 7, mini, step=1)]
        assert [len(part) for part in parts] == [3, 3, 1] * 2
        for epoch in (parts[:3], parts[3:]):
            assert sorted(np.concatenate(epoch)) == list(range(7))
        assert (parts[0] == [0, 1, 2]) != shuffle
        assert (parts[:3] == parts[3:]) != shuffle


def orders(mini, step):
    """Return the rows of each epoch, in the order of the updates."""
    batch = BatchFuture.of(DataProto(non_tensor_batch={"row": list(range(16))}))
    parts = [part.get().non_tensor_batch["row"] for part in minibatches(batch, 16, mini, step)]
    assert [len(part) for part in parts] == [8] * 4
    return [np.concatenate(parts[epoch : epoch + 2]).tolist() for epoch in (0, 2)]


def test_each_step_and_epoch_has_its_own_order():
    found = [*orders(MINI, 1), *orders(MINI, 2), *orders(MiniBatching(8, 2, shuffle=True, seed=2), 1)]
    assert all(sorted(order) == list(range(16)) for order in found)
    assert len({tuple(order) for order in found}) == len(found)
    assert orders(MINI, 1) == found[:2]
