from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tandem.protocol import DataProto, Ragged, SamplingParams
from tandem.runtime import BatchFuture, Dispatch, ResourcePool, Worker, WorkerGroup, register
from tandem.runtime.index import Index
from tandem.runtime.local_backend import LocalBackend
from tandem.trainer.dealing import Dealer
from tandem.trainer.roles import Roles
from tandem.trainer.scoring import Scoring
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


def test_mini_batches_are_formed_before_the_batch_is_there():
    mini = MiniBatching(samples=3, epochs=2, shuffle=True, seed=1)
    waited = Mock(side_effect=AssertionError("waited for a value"))
    there = Mock(borrowed=False, get=waited, index=waited, wait=waited, done=Mock(return_value=False))
    unseen = BatchFuture.collected([there], "compute_advantages")
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
    batch = BatchFuture.of(DataProto(non_tensor_batch={"row": list(range(16))}))
    parts = [part.get().non_tensor_batch["row"] for part in minibatches(batch, 16, mini, step)]
    assert [len(part) for part in parts] == [8] * 4
    return [np.concatenate(parts[epoch : epoch + 2]).tolist() for epoch in (0, 2)]


def test_each_step_and_epoch_has_its_own_order():
    found = [*orders(MINI, 1), *orders(MINI, 2), *orders(MiniBatching(8, 2, shuffle=True, seed=2), 1)]
    assert all(sorted(order) == list(range(16)) for order in found)
    assert len({tuple(order) for order in found}) == len(found)
    assert orders(MINI, 1) == found[:2]


def table(uids, column, lengths):
    ragged = Ragged.from_lengths(torch.zeros(sum(lengths)), torch.tensor(lengths))
    return DataProto({column: ragged}, {"uid": uids})


def index(uids, column, lengths):
    return Index.of(table(uids, column, lengths))


def shares(order, count):
    return [sorted(rows.tolist()) for rows in order.chunk(count)]


def test_prompts_are_dealt_by_what_was_written_to_them_the_last_time():
    dealer = Dealer()
    first = index([f"0-{row}" for row in range(4)], "prompts", [5, 5, 5, 5])
    # the responses have 100 and 100, 1 and 3, 90 and 110, 2 and 2 tokens
    written = [105, 105, 6, 8, 95, 115, 7, 7]
    dealer.learn(first, index([f"0-{row}" for row in range(4) for _ in range(2)], "tokens", written))
    again = index([f"1-{row}" for row in range(4)], "prompts", [5, 5, 5, 5])
    assert shares(dealer.order(again, 2), 2) == [[0, 1], [2, 3]]
    turned = index(["1-0", "1-2", "1-1", "1-3"], "prompts", [5, 5, 5, 5])
    assert shares(dealer.order(turned, 2), 2) == [[0, 2], [1, 3]]


def test_a_new_prompt_is_expected_to_be_answered_as_the_others_were():
    dealer = Dealer()
    known = index(["0-0", "0-1"], "prompts", [4, 4])
    dealer.learn(known, index(["0-0", "0-1"], "tokens", [104, 24]))  # responses of 100 and 20 tokens: mean 60
    new = index(["0-0", "0-1", "0-7", "0-8"], "prompts", [4, 4, 4, 4])
    assert shares(dealer.order(new, 2), 2) == [[0, 1], [2, 3]]  # 120 tokens for each rank


def test_prompts_that_nobody_answered_are_dealt_by_their_own_length_and_one_rank_gets_them_as_they_are():
    fresh = index(["a", "b", "c", "d"], "prompts", [90, 10, 80, 20])
    assert shares(Dealer().order(fresh, 2), 2) == [[0, 1], [2, 3]]
    assert Dealer().order(fresh, 1) is None


class Writer(Worker):
    def __init__(self):
        self.seen = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate_sequences(self, prompts, n, params):
        self.seen += prompts.non_tensor_batch["uid"].tolist()
        out = prompts.repeat(n)
        return DataProto({"sample": torch.arange(len(prompts) * n) % n}, {"uid": out.non_tensor_batch["uid"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_scores(self, samples):
        uids = torch.tensor([int(uid) for uid in samples.non_tensor_batch["uid"]])
        return DataProto({"scores": uids * 10 + samples.dense("sample")})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def order(self):
        return self.seen


def test_samples_come_back_in_the_order_of_the_prompts():
    group = WorkerGroup(LocalBackend(), Writer, ResourcePool([1]))
    roles = Roles(group, group, group, {}, None, {}, group, group, Scoring(None), scores_parts=False)
    prompts = BatchFuture.of(table(["1", "2", "3", "4", "5"], "prompts", [3, 9, 8, 1, 7]))
    plain = roles.generate(prompts, 2, SamplingParams(max_tokens=1), Dealer())
    dealt = replace(roles, rollout_shares=2).generate(prompts, 2, SamplingParams(max_tokens=1), Dealer())
    assert group.order()[0][5:] == ["1", "2", "4", "3", "5"]  # ranks get 3 + 9 + 1 and 8 + 7 tokens
    for samples, scores in (plain, dealt):
        assert samples.get().non_tensor_batch["uid"].tolist() == np.repeat(list("12345"), 2).tolist()
        assert samples.get().dense("sample").tolist() == [0, 1] * 5
        assert scores.get().dense("scores").tolist() == [10, 11, 20, 21, 30, 31, 40, 41, 50, 51]
