from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engines.rollout.draws.keyed import row_key
from tandem.engines.rollout.draws.rows import Rows
from tandem.engines.rollout.draws.sampler import sample
from tandem.errors import EngineError
from tandem.protocol import Request, SamplingParams
from tests.contract.world import check_tokens

CPU = torch.device("cpu")
VOCABULARY = 37


def logits_at(request, step):
    """Return logits that depend on the request and the step and prefer low tokens."""
    rng = np.random.default_rng([row_key(request) % 2**32, step])
    return rng.normal(size=VOCABULARY) * 2 - 0.1 * np.arange(VOCABULARY)


def request(index, params, prompt=(1, 2, 3)):
    return Request(f"r{index}", index % 3, np.array(prompt), params)


def finished(rows, at, stopped):
    reasons = ["stop" if why else "length" for why in stopped]
    samples = [rows.sample(int(row), reason) for row, reason in zip(at, reasons, strict=True)]
    return {sample.id: sample for sample in samples}


def step(rows, at, ahead=0):
    """Draw for the rows `at`."""
    logits = [logits_at(rows.request[row], int(rows.produced[row]) + ahead) for row in at]
    params = rows.params(at, VOCABULARY, CPU)
    return rows.draw(at, torch.tensor(np.array(logits)), params, ahead)


def run(requests, capacity=None):
    """Run all requests to their end and return their samples by id. Finished rows leave at once."""
    rows, waiting, out = Rows(capacity or len(requests)), list(requests), {}
    while waiting or rows.count:
        free = rows.capacity - rows.count
        if waiting[:free]:
            rows.add(waiting[:free])
            waiting = waiting[free:]
        at = np.arange(rows.count)
        done, stopped = rows.accept(at, step(rows, at), 0, None)
        out |= finished(rows, at[done], stopped[done])
        rows.remove(done)
    return out


def check(asked, sample):
    logits = [logits_at(asked, t) for t in range(len(sample.token_ids))]
    check_tokens(asked, sample, logits, 1e-9)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.5]),
    top_k=st.sampled_from([-1, -1, 3, 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.6, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1, -0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.9, -0.5]),
    min_tokens=st.sampled_from([0, 0, 3]),
    max_tokens=st.integers(3, 9),
    stop_token_ids=st.sampled_from([(), (0,), (4, 1, 2), (VOCABULARY + 5,)]),
    logit_bias=st.sampled_from([(), (), ((0, 1.5), (36, 2.5), (4, -30.0))]),
    seed=st.integers(0, 9),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=9),
    capacity=st.integers(1, 9),
    prompts=st.lists(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6), min_size=9, max_size=9
    ),
)
def test_mixed_rows_that_come_and_go_follow_the_reference(params, capacity, prompts):
    requests = [request(i, p, prompts[i]) for i, p in enumerate(params)]
    samples = run(requests, capacity)
    for asked in requests:
        check(asked, samples[asked.id])


PENALISED = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.8, max_tokens=12)


def test_tokens_drawn_ahead_are_those_drawn_one_by_one():
    late = SamplingParams(min_tokens=4, stop_token_ids=(0, 1, 2, 3), max_tokens=12)
    requests = [request(0, PENALISED), request(1, late), request(2, SamplingParams(max_tokens=12))]
    expected = run(requests)
    rows, out = Rows(3), {}
    rows.add(requests)
    alive, flight = np.arange(3), None
    while len(alive):
        later = step(rows, alive, ahead=int(flight is not None)) if len(out) < 3 else None
        if flight is not None:
            at, drawn = flight
            kept = torch.from_numpy(np.flatnonzero(np.isin(at, alive)))
            done, stopped = rows.accept(at[kept], type(drawn)(*(part[kept] for part in drawn)), 0, None)
            out |= finished(rows, at[kept][done], stopped[done])
        flight = (alive, later)
        alive = np.array([row for row in alive if rows.request[row].id not in out], dtype=np.int64)
    assert out.keys() == expected.keys()
    assert all(sample.token_ids.tolist() == expected[id].token_ids.tolist() for id, sample in out.items())


def test_draws_that_are_never_accepted_leave_no_trace_in_the_penalties():
    asked = request(0, PENALISED)
    rows = Rows(2)
    rows.add([asked])
    at = np.arange(1)
    for _ in range(12):
        step(rows, at)
        step(rows, at, ahead=1)
        rows.accept(at, step(rows, at), 0, None)
    check(asked, rows.sample(0, "length"))


def test_a_row_may_pause_while_others_go_on():
    asked = [request(i, PENALISED) for i in range(3)]
    rows = Rows(3)
    rows.add(asked)
    for at in ([0, 1, 2], [2], [0, 2], [1], [2, 0], [1, 0]) * 4:
        chosen = np.array([row for row in at if rows.produced[row] < 12], dtype=np.int64)
        if len(chosen):
            rows.accept(chosen, step(rows, chosen), 0, None)
    for row in range(3):
        written = int(rows.produced[row])
        assert written > 8
        whole = run([asked[row]])[asked[row].id]
        assert rows.tokens[row, :written].tolist() == whole.token_ids[:written].tolist()


def test_histories_are_given_back_with_the_last_penalised_row():
    rows = Rows(40)
    rows.add([request(i, PENALISED) for i in range(20)] + [request(30, SamplingParams())])
    step(rows, np.arange(21))
    assert rows._history.counts_SV.shape == (32, VOCABULARY)
    rows.remove(np.arange(21) < 20)
    assert rows._history is None
    rows.add([request(40, PENALISED)])
    step(rows, np.array([1]))
    assert rows._history.counts_SV.sum() == 1


class Copies(TorchDispatchMode):
    """A mode that records whether each copy from the host to the device is non-blocking."""

    def __init__(self):
        super().__init__()
        self.non_blocking = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            self.non_blocking.append(bool(kwargs.get("non_blocking")))
        return func(*args, **kwargs)


def test_no_copy_to_the_device_is_waited_for():
    meta = torch.device("meta")
    with Copies() as copies:
        torch.ones(2).to(meta)
    assert copies.non_blocking == [False]
    late = SamplingParams(min_tokens=5, stop_token_ids=(1, 2))
    biased = SamplingParams(logit_bias=((3, 1.0),), top_p=0.9)
    rows = Rows(4)
    at = rows.add([request(i, params) for i, params in enumerate((late, biased, PENALISED, late))])
    with Copies() as copies, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", lambda *_, **options: pytest.fail(f"torch.tensor with {options}"))
        params = rows.params(at, VOCABULARY, meta)
        for ahead in (0, 1):
            rows.draw(at, torch.empty(4, VOCABULARY, device=meta), params, ahead)
    assert len(copies.non_blocking) > 15 and all(copies.non_blocking)


def test_only_the_edits_of_a_step_change_its_logits():
    rows = Rows(2)
    at = rows.add([request(0, PENALISED), request(1, SamplingParams(logit_bias=((3, 50.0),)))])
    params = rows.params(at, VOCABULARY, CPU)
    logits, numbers = torch.randn(2, VOCABULARY, dtype=torch.float64), torch.tensor([0.2, 0.7]).double()
    plain = sample(logits, numbers, replace(params, edits=None))
    unedited = sample(logits, numbers, params)
    assert all(torch.equal(a, b) for a, b in zip(plain, unedited, strict=True))


def test_rows_without_edits_build_none():
    rows, at = Rows(2), np.arange(2)
    rows.add([request(0, SamplingParams()), request(1, SamplingParams(top_k=3, temperature=0.5))])
    params = rows.params(at, VOCABULARY, CPU)
    assert params.edits is rows._step_edits(at, params, 0, torch.zeros(2, VOCABULARY)) is None
    assert params.cuts.rows_C.tolist() == [1]


def test_logits_that_leave_no_token_are_refused_and_nothing_is_appended():
    every = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCABULARY)))
    rows = Rows(2)
    rows.add([request(0, SamplingParams()), request(1, every)])
    with pytest.raises(EngineError, match=r"\('r1', 1\) at response token 0"):
        rows.accept(np.arange(2), step(rows, np.arange(2)), 0, None)
    assert rows.produced[:2].tolist() == [0, 0]
