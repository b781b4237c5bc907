"""Engines over a model whose rotary angles all change when a sequence grows beyond 16 tokens.

The reference is a forward of transformers over the tokens before each sampled token, alone.
"""

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import SharedModule
from tandem.engines.rollout.hf import HFEngine
from tandem.models.angles import forget_lengths
from tests.engines.rollout.case import drain, native, request
from tests.support.marks import slow_but

LIMIT = 16
AHEAD, WHOLE = {"run_ahead": True}, {"enable_chunked_prefill": False}
CASES = [
    *({}, AHEAD, {"enable_prefix_caching": False}, AHEAD | {"max_num_batched_tokens": 7}),
    *(WHOLE, AHEAD | WHOLE, AHEAD | {"num_gpu_blocks_override": 100}),
]


@pytest.fixture
def model(tiny):
    return tiny("phi3_longrope", torch.float64)


def make(model, **options):
    return native(model, **{"block_size": 4, "max_length": 80, "num_gpu_blocks_override": 20, **options})


def alone(model, row):
    """Return the logits after the last token of a row."""
    forget_lengths(model)
    with torch.no_grad():
        return model(torch.from_numpy(row)[None], use_cache=False).logits[0, -1]


def check(model, requests, samples):
    """Compare each log-prob, and each greedy token, with the reference."""
    for each in requests:
        ids, written = each.prompt_ids, samples[each.id].token_ids
        rows = [np.concatenate([ids, written[:count]]) for count in range(len(written))]
        logits = torch.stack([alone(model, row) for row in rows])
        wanted = logits.log_softmax(-1)[torch.arange(len(written)), torch.from_numpy(written)]
        np.testing.assert_allclose(samples[each.id].log_probs, wanted.numpy(), rtol=1e-9, atol=1e-12)
        assert each.params.temperature or logits.argmax(-1).tolist() == written.tolist()


@pytest.mark.parametrize("options", slow_but(CASES[:4], CASES), ids=str)
def test_each_token_is_that_of_the_sequence_so_far(options, model, make_requests):
    greedy = {"max_tokens": 20, "temperature": 0.0}
    requests = make_requests(12, 2, temperature=1.0)
    requests += [request(f"greedy {n}", prompt=n, **greedy) for n in (1, 9, 16, 17)]
    ends = np.array([[len(each.prompt_ids), each.params.max_tokens] for each in requests]).cumsum(1)
    assert {(start > LIMIT, end > LIMIT) for start, end in ends} == {(0, 0), (0, 1), (1, 1)}
    engine = make(model, max_num_seqs=12, **options)
    engine.submit(requests)
    finished, gone = {}, [each.id for each in requests[5:20:4]]
    for _ in range(8):
        finished |= {sample.id: sample for sample in engine.poll(0.0)}
        engine._scheduler.blocks.check()
    gone = [id for id in gone if id not in finished]
    partial = {sample.id: sample for sample in engine.abort(gone, keep_partial=True)}
    samples = finished | partial | drain(engine)
    engine._scheduler.blocks.check()
    assert engine.stats()["preemptions"] > 0 or "num_gpu_blocks_override" in options
    begun = {id for id, sample in samples.items() if len(sample.token_ids)}
    check(model, [each for each in requests if each.id in begun], samples)


def test_a_prefix_is_reused_by_sequences_of_the_same_angles(model):
    """A sequence that grows from 6 to 30 tokens leaves 4 blocks of short sequences and 7 of long ones."""
    engine, first = make(model, num_gpu_blocks_override=100), request("a", prompt=6, max_tokens=24)
    engine.submit([first])
    answer = drain(engine)[first.id]
    whole, reused = np.concatenate([first.prompt_ids, answer.token_ids]), 0
    for length, found in ((10, 8), (15, 12), (17, 16), (30, 28)):
        again = request(str(length), prompt=whole[:length], max_tokens=2, temperature=0.0)
        engine.submit([again])
        samples = drain(engine)
        assert engine.stats()["cached_prefix_tokens"] - reused == found
        reused = engine.stats()["cached_prefix_tokens"]
        check(model, [again], samples)


@pytest.mark.parametrize(("prompt", "computed"), [(14, 14 + 4 * 17), (18, 18)])
def test_samples_of_one_prompt(prompt, computed, model):
    """The prompt is computed once. A sample that crosses the limit is computed again, with 17 tokens."""
    engine = make(model, num_gpu_blocks_override=100, enable_prefix_caching=False)
    requests = [request("a", sample, prompt, max_tokens=8) for sample in range(4)]
    engine.submit(requests)
    check(model, requests, drain(engine))
    assert engine.stats()["prefill_tokens"] == computed and engine.stats()["preemptions"] == 0


@pytest.mark.parametrize("name", ["phi3_longrope", "llama_dynamic"])
def test_the_engine_that_calls_generate(name, tiny, make_requests):
    model, requests = tiny(name, torch.float64), make_requests(6, 2, temperature=1.0)
    engine = HFEngine(device=torch.device("cpu"), max_length=80)
    engine.update_weights(SharedModule(model), 0)
    engine.submit(requests)
    check(model, requests, drain(engine))
