from dataclasses import replace

import numpy as np
import torch

from tandem.protocol import DataProto, Ragged, SamplingParams
from tandem.runtime import BatchFuture, Dispatch, ResourcePool, Worker, WorkerGroup, register
from tandem.runtime.index import Index
from tandem.runtime.local_backend import LocalBackend
from tandem.trainer.dealing import Dealer
from tandem.trainer.roles import Roles
from tandem.trainer.scoring import Scoring


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
    """Answers each prompt with the prompt's uid and the number of the sample."""

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
