"""A stress test: random requests arrive and are aborted, on an engine with a far too small cache.

    python -m tests.engines.rollout.native.stress --requests 10000 --dtype float64      (make stress)

Every request is answered once, no block of the cache is lost, and every response is the one that the request
gets when it runs alone. In float64 this is exact. In float32 the other rows change the last bits of a logit.
So a response may differ, starting at a token whose random number is within rounding of the border between two
tokens. For each such response the test shows that this is the reason.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.draws.rows import Rows
from tandem.engines.rollout.native import steps
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.graphs import GraphedRunner
from tandem.protocol import Request, Sample, SamplingParams
from tests.contract.world import SHAPE, VOCABULARY
from tests.engines.rollout.case import native

LONGEST_PROMPT, LONGEST_RESPONSE = 40, 56
MOST = LONGEST_PROMPT + LONGEST_RESPONSE
# Small blocks run out in the middle of responses. The CPU kernels, which have no float64, need large ones.
BLOCK_SIZES = {torch.float64: 4, torch.float32: 16}
ROUNDING = 1e-5  # more than the difference of this model's float32 logits between batches
Id = tuple[str, int]


def build_model(dtype: torch.dtype, window: int = 0, limit: int = 0) -> PreTrainedModel:
    """Build a model with two layers and peaked distributions.

    A window is that of the first layer. A limit is that of longrope angles.
    """
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    kinds = kinds | {"use_sliding_window": True} if window else {}
    if limit:
        rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0}
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.5, 3.0, 5.0, 8.0]}
        rope |= {"original_max_position_embeddings": limit}
        rope_keys = {"rope_parameters": rope, "original_max_position_embeddings": limit}
        config = Phi3Config(**SHAPE | sizes | rope_keys | {"pad_token_id": 0})
        return Phi3ForCausalLM(config).to(dtype).eval()
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE | sizes | kinds)).to(dtype).eval()


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in ids)


def random_requests(count: int, seed: int) -> list[Request]:
    """Return one to four samples of each prompt.

    Half of the prompts begin like an earlier one. Most responses are short. The few long responses need more
    blocks than there are.
    """
    rng = np.random.default_rng(seed)
    requests: list[Request] = []
    prompts: list[np.ndarray] = []
    while len(requests) < count:
        prompt = rng.integers(0, VOCABULARY, size=rng.integers(1, LONGEST_PROMPT + 1))
        if prompts and rng.random() < 0.5:
            head = prompts[rng.integers(len(prompts))]
            prompt = np.concatenate([head[: rng.integers(1, len(head) + 1)], prompt])[:LONGEST_PROMPT]
        first = int(rng.integers(0, len(prompt))) if rng.random() < 0.1 else -1
        uid, samples = f"p{len(prompts)}", min(int(rng.integers(1, 5)), count - len(requests))
        requests += [Request(uid, sample, prompt, _random_params(rng), first) for sample in range(samples)]
        prompts.append(prompt)
    return requests


def _random_params(rng: np.random.Generator) -> SamplingParams:
    longest = min(LONGEST_RESPONSE, int(rng.geometric(0.08)))
    some = {
        "top_k": int(rng.integers(1, 30)),
        "top_p": float(rng.uniform(0.3, 1.0)),
        "min_p": float(rng.uniform(0.0, 0.3)),
        "repetition_penalty": float(rng.uniform(0.8, 1.5)),
        "presence_penalty": float(rng.uniform(-1.0, 1.0)),
        "frequency_penalty": float(rng.uniform(-1.0, 1.0)),
        "min_tokens": int(rng.integers(0, longest + 1)),
        "logit_bias": tuple((int(t), float(rng.normal())) for t in rng.choice(VOCABULARY, 3, replace=False)),
        "stop_token_ids": tuple(rng.integers(0, VOCABULARY, size=rng.integers(1, 6)).tolist()),
        "stop": tuple(decode(rng.integers(0, 26, size=2)) for _ in range(3)),
    }
    temperature, seed = float(rng.choice([0.0, 0.7, 1.0, 1.3])), int(rng.integers(3))
    some = {name: value for name, value in some.items() if rng.random() < 0.25}
    return SamplingParams(temperature=temperature, max_tokens=longest, seed=seed, **some)


def one_by_one(module: PreTrainedModel, requests: Sequence[Request]) -> dict[Id, Sample]:
    """Run each request alone, with a cache that holds only this request."""
    engine = native(module, max_length=MOST, max_num_seqs=1, enable_prefix_caching=False, decode=decode)
    return {sample.id: sample for sample in generate(engine, requests)}


@dataclass
class Outcome:
    """The samples by id, those of aborted requests apart, or only their ids if nothing was kept."""

    finished: dict[Id, Sample] = field(default_factory=dict)
    partial: dict[Id, Sample] = field(default_factory=dict)
    dropped: set[Id] = field(default_factory=set)
    stats: dict[str, float] = field(default_factory=dict)


def _again(work: Callable[[], None]) -> Callable[[], None]:
    """Return the work itself. It replaces a CUDA graph and runs again on the same buffers."""
    work()
    return work


def stressed(
    module: PreTrainedModel, requests: Sequence[Request], seed: int, *, graphs: bool = False, **options: Any
) -> Outcome:
    """Run all requests with a cache for two of the longest sequences.

    They arrive in bursts, one in twenty is aborted, and the weights are set again at times. With `graphs`
    decode steps run in the fixed buffers of CUDA graphs, apart from prompts.
    """
    block = BLOCK_SIZES[module.dtype]
    defaults = {"block_size": block, "num_gpu_blocks_override": 2 * MOST // block, "decode": decode}
    defaults |= {"max_length": MOST, "max_num_seqs": 24, "max_num_batched_tokens": 64}
    engine = native(**defaults | options)
    engine._steps.graphs = engine._split_steps = graphs
    with mock.patch.object(steps, "GraphedRunner", partial(GraphedRunner, capture=_again)):
        return _run(engine, module, requests, np.random.default_rng(seed))


def _run(
    engine: NativeEngine, module: PreTrainedModel, requests: Sequence[Request], rng: np.random.Generator
) -> Outcome:
    engine.update_weights(SharedModule(module), 0)
    out, open_ids, submitted, idle_polls = Outcome(), dict[Id, None](), 0, 0
    while submitted < len(requests) or engine.pending():
        if len(open_ids) < 100 and rng.random() < 0.2:
            burst = requests[submitted : submitted + int(rng.integers(1, 40))]
            engine.submit(burst)
            open_ids.update((request.id, None) for request in burst)
            submitted += len(burst)
        if open_ids and rng.random() < 0.02:
            gone = [list(open_ids)[place] for place in rng.integers(len(open_ids), size=2)]
            _abort(engine, sorted(set(gone)), bool(rng.random() < 0.5), out, open_ids)
        if rng.random() < 0.002:
            engine.update_weights(SharedModule(module), 1)
        written = engine.progress()
        for sample in engine.poll(timeout_s=0.0):
            assert sample.id in open_ids and sample.id not in out.finished, sample.id
            del open_ids[sample.id]
            out.finished[sample.id] = sample
        assert engine.pending() == len(open_ids)
        idle_polls = 0 if engine.progress() > written or not open_ids else idle_polls + 1
        assert idle_polls < 100, "no token was written in 100 steps"
        if rng.random() < 0.02:
            engine._scheduler.blocks.check()
    engine._scheduler.blocks.check()
    blocks = engine._scheduler.blocks
    assert blocks.in_use == 0 < blocks.pool.blocks, "blocks are held although no sequence runs"
    out.stats = engine.stats()
    return out


def _abort(
    engine: NativeEngine, ids: Sequence[Id], keep: bool, out: Outcome, open_ids: dict[Id, None]
) -> None:
    partial = engine.abort(ids, keep_partial=keep)
    assert sorted(sample.id for sample in partial) == (list(ids) if keep else [])
    for sample in partial:  # some were finished by the step that ran ahead
        (out.partial if sample.finish_reason == "abort" else out.finished)[sample.id] = sample
    out.dropped |= set() if keep else set(ids)
    for id in ids:
        del open_ids[id]


def check_outcome(
    requests: Sequence[Request], out: Outcome, alone: dict[Id, Sample], dtype: torch.dtype
) -> int:
    """Compare the outcome with the same requests run one by one.

    Return the number of responses that differ, starting at a token whose draw was a tie within rounding.
    """
    assert sorted([*out.finished, *out.partial, *out.dropped]) == sorted(request.id for request in requests)
    exact = build_model(torch.float64) if dtype != torch.float64 else None
    atol, ties, samples = 1e-10 if exact is None else 1e-3, 0, out.finished | out.partial
    for request in requests:
        if request.id in out.dropped:
            continue
        sample, expected = samples[request.id], alone[request.id]
        ours, theirs = sample.token_ids.tolist(), expected.token_ids.tolist()
        pairs = enumerate(zip(ours, theirs, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        np.testing.assert_allclose(sample.log_probs[:same], expected.log_probs[:same], atol=atol)
        if same == len(ours) and sample.finish_reason == "abort":
            continue
        if ours == theirs:
            assert sample.finish_reason == expected.finish_reason, request
            continue
        both = ours[same], theirs[same]
        assert exact is not None, f"{request} differs at token {same}: {both}"
        assert is_tie(exact, request, expected.token_ids[:same], both), (request, same, both)
        ties += 1
    return ties


def is_tie(exact: PreTrainedModel, request: Request, written: np.ndarray, tokens: tuple[int, int]) -> bool:
    """Return whether the float64 model's logits, up to rounding, give either token after `written` (R)."""
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, written]))
    with torch.no_grad():
        logits_V = exact(ids[None]).logits[0, -1]
    noise, count = torch.Generator().manual_seed(0), 1024
    logits_CV = logits_V + ROUNDING * torch.randn(count, VOCABULARY, dtype=torch.float64, generator=noise)
    rows = Rows(count)
    places = rows.add([request] * count)
    rows.tokens[:, : len(written)] = written
    rows.produced[:] = len(written)
    drawn = rows.draw(places, logits_CV, rows.params(places, VOCABULARY, logits_CV.device))
    return set(tokens) <= set(drawn.tokens_R.tolist())


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--dtype", nargs="+", choices=["float64", "float32"], default=["float64", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-ahead", action="store_true", help="launch steps before tokens are fetched")
    parser.add_argument("--graphs", action="store_true", help="decode in the buffers of CUDA graphs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    requests = random_requests(options.requests, options.seed)
    for name in options.dtype:
        dtype = getattr(torch, name)
        module, began = build_model(dtype), time.monotonic()
        out = stressed(module, requests, options.seed, run_ahead=options.run_ahead, graphs=options.graphs)
        stressed_s = time.monotonic() - began
        ties = check_outcome(requests, out, one_by_one(module, requests), dtype)
        aborted, both_s = len(out.partial) + len(out.dropped), time.monotonic() - began
        print(f"{name}: {len(requests)} requests in {stressed_s:.1f} s, with one by one {both_s:.1f} s")
        print(f"{len(out.finished)} finished, {aborted} aborted, {out.stats['preemptions']:.0f} preempted")
        print(f"{ties} differ at a tie within rounding, all others are the same", flush=True)


if __name__ == "__main__":
    main()
