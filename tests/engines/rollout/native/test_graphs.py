"""Tests of `GraphedRunner`. The capture runs the work on the fixed buffers each time, as a graph does."""

from dataclasses import replace

import pytest
import torch

from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.graphs import GraphedRunner, graph_sizes
from tandem.engines.rollout.native.paged import PagedCache
from tandem.engines.rollout.native.runner import make_runner
from tests.engines.rollout.case import CPU, step_of

BLOCK, BLOCKS, MAX_BLOCKS = 4, 64, 6


def attention_over(runner):
    """Return the attention over a cache with content everywhere."""
    cache = PagedCache(runner.layers, BLOCKS, BLOCK, runner.dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    for part in cache.parts:
        part.copy_(torch.randn(part.shape, generator=generator, dtype=part.dtype))
    return make_attention(cache, "torch")


def step(lengths, seed=0, counts=None):
    """Return a step of sequences that will have these lengths, by default with one token each."""
    generator, counts = torch.Generator().manual_seed(seed), counts or [1] * len(lengths)
    width = -(-max(lengths) // BLOCK)
    tables = (
        torch.randperm(BLOCKS, generator=generator)[: len(lengths) * width].view(len(lengths), width).int()
    )
    return step_of(tables, lengths, counts, BLOCK, torch.randint(0, 97, (sum(counts),), generator=generator))


class Made:
    """A runner with graphs and a plain one, each over a cache of its own."""

    def __init__(self, runner, capture=None):
        self.runner, self.captured, self.runs = runner, 0, 0
        self.attention, self.plain = attention_over(runner), attention_over(runner)
        self.graphed = GraphedRunner(runner, self.attention, 20, MAX_BLOCKS, capture or self.capture)

    def capture(self, work):
        self.captured += 1
        work()

        def again():
            self.runs += 1
            work()

        return again

    def check(self, step, tolerance=1e-10):
        logits = self.graphed.forward(step, self.attention)
        with torch.inference_mode():
            expected = self.runner.forward(step, self.plain)
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
        ours, theirs = ((*each.cache.keys, *each.cache.values) for each in (self.attention, self.plain))
        for left, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.fixture(params=["fused", "module"])
def runner(request, tiny):
    return make_runner(request.param, tiny("qwen3", torch.float64), MAX_BLOCKS * BLOCK)


def test_padding_changes_neither_logits_nor_cache(runner):
    made = Made(runner)
    # From large to small and back: the buffers then hold longer tables and other slots of an earlier step.
    for seed, lengths in enumerate([[7] * 9, [3, 24, 1], [5], [2, 9], [4] * 5, [6, 23, 2, 17, 3, 11]]):
        made.check(step(lengths, seed))
    assert made.runs == made.captured == 6  # 20, then 16, 4, 1, 2 and 8 rows
    made.check(replace(step([3, 8, 5]), logits_L=torch.tensor([0, 2])))  # only some logits are wanted


def test_prompts_and_steps_larger_than_any_graph_run_as_they_come(runner):
    made = Made(runner)
    for each in (step([9], counts=[2]), step([2] * 21)):
        made.check(each, tolerance=0)
    assert made.captured == 0


def test_a_capture_that_fails_leaves_a_plain_runner(runner):
    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    made = Made(runner, refuse)
    with pytest.warns(RuntimeWarning, match="operation not permitted when stream is capt"):
        made.check(step([3, 8]), tolerance=0)
    made.check(step([3, 8]), tolerance=0)  # there is no second warning


def test_sizes():
    assert graph_sizes(1) == (1,) and graph_sizes(6) == (1, 2, 4, 6)
    assert graph_sizes(16) == (1, 2, 4, 8, 16) and graph_sizes(40) == (1, 2, 4, 8, 16, 32, 40)
    assert graph_sizes(512) == graph_sizes(4096) == (1, 2, 4, 8, *range(16, 513, 16))
