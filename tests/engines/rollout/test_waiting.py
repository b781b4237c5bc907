import numpy as np

from tandem.engines.rollout.native.waiting import Waiting, rectangles
from tandem.protocol import Request, SamplingParams


def request(uid, sample=0, length=4):
    return Request(uid, sample, np.full(length, 1 + len(uid)), SamplingParams())


def taken(admissions):
    return [[r.id for r in admission.requests] for admission in admissions]


def test_samples_of_one_prompt_come_together_in_order_of_its_first_request():
    waiting = Waiting()
    waiting.add([request("a", 0), request("bb", 0), request("a", 1)])
    waiting.add([request("a", 2)])
    assert len(waiting) == 4
    admissions = waiting.admit(10, 100)
    assert taken(admissions) == [[("a", 0), ("a", 1), ("a", 2)], [("bb", 0)]]
    assert len(waiting) == 0


def test_rows_bind_and_the_rest_stays_in_front():
    waiting = Waiting()
    waiting.add([request("a", s) for s in range(3)] + [request("bb")])
    assert taken(waiting.admit(2, 100)) == [[("a", 0), ("a", 1)]]
    assert taken(waiting.admit(2, 100)) == [[("a", 2)], [("bb", 0)]]


def test_tokens_bind_but_one_long_prompt_runs_alone():
    waiting = Waiting()
    waiting.add([request("a", 0, 50), request("bb", 0, 4), request("ccc", 0, 4), request("dddd", 0, 4)])
    assert taken(waiting.admit(10, 10)) == [[("a", 0)]]
    assert taken(waiting.admit(10, 10)) == [[("bb", 0)], [("ccc", 0)]]
    assert taken(waiting.admit(10, 10)) == [[("dddd", 0)]]


def test_same_uid_with_another_prompt_does_not_share():
    waiting = Waiting()
    waiting.add([request("a", 0, 4), request("a", 1, 6)])
    assert len(waiting.admit(10, 100)) == 2


def test_drop():
    waiting = Waiting()
    waiting.add([request("a", 0), request("a", 1), request("bb")])
    assert [r.id for r in waiting.drop({("a", 1), ("bb", 0), ("x", 0)})] == [("a", 1), ("bb", 0)]
    assert [r.id for r in waiting] == [("a", 0)]


def test_rectangles_hold_everything_with_little_padding():
    waiting = Waiting()
    lengths = np.random.default_rng(0).integers(1, 400, size=100)
    waiting.add([request(f"p{i}", 0, int(n)) for i, n in enumerate(lengths)])
    batches = rectangles(waiting.admit(1000, 10**6))
    assert sorted(a.requests[0].uid for batch in batches for a in batch) == sorted(
        f"p{i}" for i in range(100)
    )
    area = sum(len(batch[0].prompt.prompt_ids) * len(batch) for batch in batches)
    assert area < 1.2 * lengths.sum()
    assert len(batches) < 20
    for batch in batches:
        sizes = [len(a.prompt.prompt_ids) for a in batch]
        assert sizes == sorted(sizes, reverse=True)
