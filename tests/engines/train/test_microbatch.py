"""The cut of a rank's share into micro-batches."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engines.train.base import MicroBatching
from tandem.engines.train.microbatch import assemble, cut, cut_alike, most_tokens
from tandem.errors import ConfigError, DataError
from tandem.models.collectives import CollectiveMeter
from tandem.models.parallel import init_distributed
from tandem.protocol import DataProto, Ragged
from tests.engines.train import synthetic

CPU = torch.device("cpu")
lengths = st.lists(st.integers(1, 50), max_size=30)


@given(lengths, st.sampled_from([{}, {"max_samples": 3}, {"max_samples": 1}, {"max_tokens": 64}]))
@settings(max_examples=100, deadline=None)
def test_each_row_once_within_the_rule(rows, rule):
    parts = cut(rows, MicroBatching(**rule))
    assert sorted(itertools.chain(*parts)) == list(range(len(rows)))
    sizes = [[rows[i] for i in part] for part in parts]
    assert all(len(part) <= rule.get("max_samples", 1000) for part in sizes)
    assert all(sum(part) <= rule.get("max_tokens", 10_000) for part in sizes)
    assert all(part == sorted(part, reverse=True) for part in sizes)
    assert not rows or max(rows) in sizes[0]


EIGHT = [10, 9, 8, 7, 6, 5, 4, 3]


@pytest.mark.parametrize(
    ("rows", "rule", "how", "wanted"),
    [
        ([9, 1, 8, 2, 9, 1], {"max_samples": 2}, {}, [[0, 4], [2, 3], [1, 5]]),  # rows of like length
        (EIGHT, {"max_tokens": 60}, {"at_least": 4}, [[0, 7], [1, 6], [2, 5], [3, 4]]),  # 13 tokens each
        (EIGHT, {"max_samples": 8}, {"at_least": 4}, [list(range(8))]),
        ([50, *EIGHT[:6]], {}, {"block_tokens": 20}, [[0], [1, 2], [3, 4], [5, 6]]),  # long ones stay whole
        ([50, *EIGHT[:6]], {"max_samples": 3}, {"block_tokens": 1000}, [[0, 1, 2], [3, 4, 5], [6]]),
    ],
)
def test_parts(rows, rule, how, wanted):
    assert cut(rows, MicroBatching(**rule), **how) == wanted


def test_tokens_are_balanced_within_the_budget():
    parts = cut(EIGHT, MicroBatching(max_tokens=30))
    assert [sum(EIGHT[i] for i in part) for part in parts] == [26, 26]
    with pytest.raises(ConfigError, match="65 tokens"):
        cut([3, 65], MicroBatching(max_tokens=64))


def test_padding_counts_in_the_budget_and_similar_lengths_go_together():
    rows = torch.randint(1, 41, (30,)).tolist()
    parts = cut(rows, MicroBatching(max_tokens=100), padded=True)
    sizes = [[rows[i] for i in part] for part in parts]
    assert sorted(itertools.chain(*parts)) == list(range(30))
    assert list(itertools.chain(*sizes)) == sorted(rows, reverse=True)
    assert all(len(part) * part[0] <= 100 for part in sizes)
    assert all((len(a) + 1) * a[0] > 100 for a in sizes[:-1])  # one more row would not fit
    assert len(cut([9, 1, 8, 2], MicroBatching(max_tokens=40), padded=True, at_least=3)) == 3
    with pytest.raises(ConfigError, match="65 tokens"):
        cut([3, 65], MicroBatching(max_tokens=64), padded=True)


@pytest.mark.parametrize(
    ("rows", "most", "least", "wanted"),
    [
        ([], None, 1, [[]]),  # a ghost
        ([3, 4], 1, 1, [[1], [0]]),
        ([9, 8, 7, 6, 2, 1], 4, 2, [[0, 1, 2, 3], [4, 5]]),
        ([9, 8, 7, 6, 2, 1], 4, 4, [[0], [2], [1, 3], [4, 5]]),  # the largest is cut until there are enough
        ([9, 8], None, 5, [[0], [1], [], [], []]),
        ([], None, 2, [[], []]),
    ],
)
def test_all_ranks_have_the_same_number(rows, most, least, wanted):
    init_distributed(CPU)
    assert cut_alike(rows, MicroBatching(max_samples=most), CollectiveMeter(), least=least) == wanted


def test_the_most_tokens_that_a_model_sees_at_once():
    batch = synthetic.make_batch()  # rows of 5, 17, 30 … tokens; the model does not see the last of a row
    parts = [[0, 1], [2], []]
    assert most_tokens(batch, parts) == 29
    assert most_tokens(batch, parts, whole=True) == 30
    assert most_tokens(batch, parts, pad_to_longest=True) == 32
    assert most_tokens(batch, [[]]) == 1
    held = Ragged.from_list([[2, 3], [17], [10] * 3, *([n] for n in synthetic.LENGTHS[3:])])
    assert most_tokens(batch.union(DataProto({"sequence_lengths": held})), parts) == 27


def test_columns_follow_their_rows():
    batch = synthetic.make_batch()
    part = assemble(batch, [3, 0], frozenset({"advantages", "response_mask"}), device=CPU)
    wanted = [batch.ragged("advantages").row(i) for i in (3, 0)]
    assert torch.equal(part.columns["advantages"], torch.cat(wanted))
    assert part.offsets.tolist() == [0, 12, 17] and part.lengths.tolist() == [12, 5]
    assert torch.equal(part.inputs.places, part.columns["response_mask"].nonzero()[:, 0])
    with pytest.raises(DataError, match="no_such_column"):
        assemble(batch, [0], frozenset({"no_such_column"}), device=CPU)


def test_ghost_has_no_response():
    columns = frozenset({"advantages", "response_mask"})
    ghost = assemble(synthetic.make_batch(), [], columns, device=CPU)
    assert ghost.inputs.input_ids.tolist() == [0] and len(ghost.inputs.places) == 0
    assert ghost.columns["response_mask"].tolist() == [False]
    assert ghost.columns["advantages"].tolist() == [0.0] and ghost.offsets.tolist() == [0, 1]
