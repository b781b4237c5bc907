"""Tests of `GraphedRunner`.

The capture runs the work on the fixed buffers each time, as a graph does.
"""

from dataclasses import replace

import pytest
import torch

from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.graphs import GraphedRunner, graph_sizes
from tandem.engines.rollout.native.paged import PagedCache, StepInput
from tandem.engines.rollout.native.runner import make_runner

CPU = torch.device("cpu")
BLOCK, BLOCKS, MAX_BLOCKS = 4, 64, 6


class Captures:
    """A capture that records the work and how often it ran."""

    def __init__(self):
        self.captured = 0
        self.runs = 0

    def __call__(self, work):
        self.captured += 1
        work()

        def again():
            self.runs += 1
            work()

        return again


def filled(runner):
    """Return a cache with content everywhere."""
    cache = PagedCache(runner.layers, BLOCKS, BLOCK, runner.dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.randn(part.shape, generator=generator, dtype=part.dtype))
    return cache


def decode_step(lengths, seed=0):
    """Return a step with one token each, of sequences that will have these lengths, in their own blocks."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    lengths_S = torch.tensor(lengths, dtype=torch.int32)
    width = -(-max(lengths) // BLOCK)
    tables_SB = (torch.randperm(BLOCKS, generator=generator)[: rows * width].view(rows, width)).int()
    positions_T = lengths_S.long() - 1
    block = tables_SB[torch.arange(rows), positions_T // BLOCK].long()
    return StepInput(
        ids_T=torch.randint(0, 97, (rows,), generator=generator),
        positions_T=positions_T,
        slots_T=block * BLOCK + positions_T % BLOCK,
        starts_S1=torch.arange(rows + 1, dtype=torch.int32),
        lengths_S=lengths_S,
        tables_SB=tables_SB,
        logits_L=torch.arange(rows),
        max_query=1,
        max_length=max(lengths),
    )


@pytest.fixture(params=["fused", "module"])
def made(request, tiny):
    """Return the runner, the graphed runner, its attention and captures, and the plain runner's attention."""
    runner = make_runner(request.param, tiny("qwen3", torch.float64), MAX_BLOCKS * BLOCK)
    attention, plain = (make_attention(filled(runner), "torch") for _ in range(2))
    captures = Captures()
    return runner, GraphedRunner(runner, attention, 20, MAX_BLOCKS, captures), attention, captures, plain


def same_caches(one, other):
    ours, theirs = ((*each.cache.keys, *each.cache.values) for each in (one, other))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_padding_changes_neither_logits_nor_cache(made):
    runner, graphed, attention, captures, plain = made
    # From large to small and back: the buffers then hold longer tables and other slots of an earlier step.
    for seed, lengths in enumerate([[7] * 9, [3, 24, 1], [5], [2, 9], [4] * 5, [6, 23, 2, 17, 3, 11]]):
        step = decode_step(lengths, seed)
        logits = graphed.forward(step, attention)
        with torch.inference_mode():
            expected = runner.forward(step, plain)
        assert logits.shape == (len(lengths), 97)
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
        same_caches(attention, plain)
    assert captures.runs == 6
    assert captures.captured == 6  # 20, then 16, 4, 1, 2 and 8 rows


def test_prompts_and_steps_larger_than_any_graph_run_as_they_come(made):
    runner, graphed, attention, captures, plain = made
    two = replace(decode_step([9, 4]), starts_S1=torch.tensor([0, 2], dtype=torch.int32))
    prompt = replace(
        two,
        positions_T=torch.tensor([7, 8]),
        slots_T=two.tables_SB[0, [1, 2]].long() * BLOCK + torch.tensor([3, 0]),
        lengths_S=two.lengths_S[:1],
        tables_SB=two.tables_SB[:1],
        logits_L=torch.tensor([1]),
        max_query=2,
    )
    for step in (prompt, decode_step([2] * 21)):
        with torch.inference_mode():
            expected = runner.forward(step, plain)
        torch.testing.assert_close(graphed.forward(step, attention), expected, rtol=0, atol=0)
    same_caches(attention, plain)
    assert captures.captured == 0


def test_only_the_logits_asked_for_come_back(made):
    runner, graphed, attention, _, plain = made
    step = replace(decode_step([3, 8, 5]), logits_L=torch.tensor([0, 2]))
    with torch.inference_mode():
        expected = runner.forward(step, plain)
    torch.testing.assert_close(graphed.forward(step, attention), expected, rtol=1e-10, atol=1e-10)


def test_a_capture_that_fails_leaves_a_plain_runner(made):
    runner, _, attention, _, plain = made

    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphed = GraphedRunner(runner, attention, 20, MAX_BLOCKS, refuse)
    step = decode_step([3, 8])
    with torch.inference_mode():
        expected = runner.forward(step, plain)
    with pytest.warns(RuntimeWarning, match="operation not permitted when stream is capt"):
        logits = graphed.forward(step, attention)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    same_caches(attention, plain)
    torch.testing.assert_close(
        graphed.forward(step, attention), expected, rtol=0, atol=0
    )  # there is no second warning


def test_sizes():
    assert graph_sizes(1) == (1,)
    assert graph_sizes(6) == (1, 2, 4, 6)
    assert graph_sizes(16) == (1, 2, 4, 8, 16)
    assert graph_sizes(40) == (1, 2, 4, 8, 16, 32, 40)
    assert graph_sizes(512) == graph_sizes(4096) == (1, 2, 4, 8, *range(16, 513, 16))
