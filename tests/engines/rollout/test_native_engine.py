"""What only the native engine does: sharing, batching, memory."""

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native import engine as native
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.errors import EngineError
from tandem.models.parallel import init_distributed
from tandem.protocol import Request, SamplingParams

CPU = torch.device("cpu")


def make(model, **options):
    engine = NativeEngine(**{"device": CPU, "max_length": 128, **options})
    engine.update_weights(SharedModule(model), 0)
    return engine


@pytest.mark.parametrize("max_num_seqs", [256, 3])
def test_samples_share_their_prompts_prefill(tiny, make_requests, max_num_seqs):
    """Also when the samples of one prompt are admitted at different times."""
    engine = make(tiny(), max_num_seqs=max_num_seqs)
    requests = make_requests(6, 8)
    generate(engine, requests)
    stats = engine.stats()
    assert stats["prefill_tokens"] == sum(len(r.prompt_ids) for r in requests if r.sample == 0)
    assert stats["peak_running"] == min(48, max_num_seqs)


def test_finished_sequences_make_room_at_once(tiny):
    """Two rows, one long sequence and many short ones: the short ones pass by the long one."""
    engine = make(tiny(), max_num_seqs=2)
    lengths = [40] + [4] * 10
    requests = [
        Request(f"p{i}", 0, np.array([1, 2]), SamplingParams(max_tokens=n)) for i, n in enumerate(lengths)
    ]
    engine.submit(requests)
    order = []
    while engine.pending():
        order += [sample.uid for sample in engine.poll(10.0)]
    assert order == [f"p{i}" for i in range(1, 11)] + ["p0"]
    assert engine.stats()["decode_steps"] <= 40


def test_prefill_budget_bounds_a_step(tiny, monkeypatch):
    engine = make(tiny(), max_num_batched_tokens=20)
    widths = []
    prefill = native.NativeEngine._prefill

    def spy(self, runner, batch):
        widths.append(sum(len(admission.prompt.prompt_ids) for admission in batch))
        return prefill(self, runner, batch)

    monkeypatch.setattr(native.NativeEngine, "_prefill", spy)
    lengths = [8, 8, 8, 50, 4, 4]
    generate(
        engine,
        [
            Request(f"p{i}", 0, np.ones(n, dtype=np.int64), SamplingParams(max_tokens=6))
            for i, n in enumerate(lengths)
        ],
    )
    assert sum(widths) == sum(lengths)
    assert [width for width in widths if width > 20] == [50]


def test_rows_of_mixed_length_are_sorted(tiny, monkeypatch):
    """Short sequences admitted before long ones: sorting must shrink the spans and change no token."""
    model = tiny(dtype=torch.float64)
    prompts = [np.full(3 if i < 8 else 80, 1 + i) for i in range(16)]
    requests = [Request(f"p{i}", 0, p, SamplingParams(max_tokens=40)) for i, p in enumerate(prompts)]
    sorted_run = make(model)
    first = [sample.token_ids.tolist() for sample in generate(sorted_run, requests[:8] + requests[8:])]
    moves = []
    move = native.Rows.move
    monkeypatch.setattr(native.Rows, "move", lambda self, s, t: (moves.append(len(s)), move(self, s, t)))
    engine = make(model)
    engine.submit(requests[:8])
    engine.poll(0.0)
    engine.submit(requests[8:])
    late = {}
    while engine.pending():
        late.update((sample.uid, sample.token_ids.tolist()) for sample in engine.poll(10.0))
    assert max(moves) == 16
    assert [late[request.uid] for request in requests] == first


def test_weights_updated_in_flight_are_marked_token_by_token(tiny):
    model = tiny()
    engine = make(model)
    engine.submit([Request("a", 0, np.array([1, 2, 3]), SamplingParams(max_tokens=20))])
    engine.poll(0.0)
    engine.update_weights(SharedModule(model), 5)
    [sample] = engine.poll(10.0)
    versions = sample.versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 5}


def test_new_weights_drop_a_kept_prefill(tiny):
    """A prompt half of whose samples wait is prefilled anew for them after an update."""
    engine = make(tiny(), max_num_seqs=2)
    requests = [Request("a", s, np.arange(1, 11), SamplingParams(max_tokens=3)) for s in range(4)]
    engine.submit(requests)
    engine.poll(0.0)
    engine.update_weights(SharedModule(tiny()), 1)
    done = 0
    while done < 4:
        done += len(engine.poll(1.0))
    assert engine.stats()["prefill_tokens"] == 20


def test_memory_bounds_the_rows(tiny, make_requests, monkeypatch):
    # tiny qwen2: 2 layers * 2 heads * (8 + 8) * 4 bytes = 256 bytes per token; 64 columns per row
    monkeypatch.setattr(native, "cache_budget", lambda device, share: int(share * 10 * 64 * 256))
    model = tiny()
    engine = make(model, gpu_memory_utilization=0.5)
    requests = make_requests(20, max_tokens=12)
    assert max(len(r.prompt_ids) for r in requests) + 12 <= 64
    written = generate(engine, requests)
    stats = engine.stats()
    assert stats["peak_running"] == 5
    assert stats["cache_bytes"] <= 5 * 64 * 256
    free = generate(make(model), requests)
    assert [s.token_ids.tolist() for s in written] == [s.token_ids.tolist() for s in free]


def test_cache_too_small_for_one_sequence_says_what_fits(tiny, monkeypatch):
    monkeypatch.setattr(native, "cache_budget", lambda device, share: 100 * 256)
    engine = make(tiny())
    engine.submit([Request("a", 0, np.ones(90, dtype=np.int64), SamplingParams(max_tokens=38))])
    with pytest.raises(EngineError, match="96 tokens would fit"):
        engine.poll(1.0)


def test_a_longer_request_waits_until_fewer_rows_run(tiny, monkeypatch):
    """Room for 8 rows of 32 columns or 2 of 128: the long request needs the running ones to end first."""
    monkeypatch.setattr(native, "cache_budget", lambda device, share: 8 * 32 * 256)
    engine = make(tiny())
    short = [Request(f"s{i}", 0, np.array([1 + i]), SamplingParams(max_tokens=10 + i)) for i in range(8)]
    engine.submit(short)
    engine.poll(0.0)
    engine.submit([Request("long", 0, np.ones(100, dtype=np.int64), SamplingParams(max_tokens=10))])
    order = []
    while engine.pending():
        order += [sample.uid for sample in engine.poll(10.0)]
    assert order[-1] == "long"
    assert engine.stats()["cache_bytes"] <= 8 * 32 * 256


def test_abort_of_a_running_sequence_keeps_its_tokens(tiny):
    model = tiny(dtype=torch.float64)
    requests = [Request(f"p{i}", 0, np.array([3 + i, 4]), SamplingParams(max_tokens=9)) for i in range(3)]
    whole = generate(make(model), requests)
    engine = make(model)
    engine.submit(requests)
    engine.poll(0.0)
    [partial] = engine.abort([requests[0].id], keep_partial=True)
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.token_ids) < 9
    assert partial.token_ids.tolist() == whole[0].token_ids[: len(partial.token_ids)].tolist()
    rest = {}
    while engine.pending():
        rest.update((sample.uid, sample.token_ids.tolist()) for sample in engine.poll(10.0))
    assert rest == {s.uid: s.token_ids.tolist() for s in whole[1:]}


def test_sleep_frees_the_cache_and_the_weights(tiny, make_requests):
    engine = make(tiny())
    generate(engine, make_requests(3))
    assert engine._cache is not None
    engine.sleep()
    assert engine._cache is None
    assert engine._runner is None
    assert engine._source is None


@pytest.mark.parametrize("runner", ["fused", "module"])
def test_module_under_fsdp(tiny, make_requests, runner):
    """Generation inside an unsharded FSDP2 module equals that of the plain one."""
    requests = make_requests(5, max_tokens=10)
    expected = [s.token_ids.tolist() for s in generate(make(tiny(), runner=runner), requests)]
    mesh = init_distributed(CPU)
    model = tiny()
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
        part.unshard()
    written = [s.token_ids.tolist() for s in generate(make(model, runner=runner), requests)]
    assert written == expected


def test_a_phase_is_the_same_whatever_ran_before_it():
    """Bitwise: when rows are put in order must not depend on an earlier phase."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=2)).eval()
    rng = np.random.default_rng(0)

    def requests(count, tokens):
        prompts, responses = rng.integers(2, 60, size=count), rng.integers(1, tokens + 1, size=count)
        return [
            Request(f"p{i}", 0, rng.integers(0, 64, size=n), SamplingParams(max_tokens=int(m)))
            for i, (n, m) in enumerate(zip(prompts, responses, strict=True))
        ]

    wanted, other = requests(48, 60), requests(1, 9)

    def phase(engine, todo):
        engine.update_weights(SharedModule(model), 0)
        samples = generate(engine, todo)
        engine.sleep()
        return samples

    fresh, used = make(model), make(model)
    phase(used, other)
    assert used._steps_since_sort == 0
    for a, b in zip(phase(fresh, wanted), phase(used, wanted), strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.log_probs, b.log_probs)
