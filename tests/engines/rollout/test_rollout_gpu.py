import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.draws.sampler import RowParams, sample
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.graphs import CudaCapture, GraphedRunner
from tandem.engines.rollout.native.lasting import Lasting, lasting_bytes
from tandem.engines.rollout.native.paged import LayerShape, PagedCache
from tandem.engines.rollout.native.runner import make_runner
from tests.engines.rollout.case import CPU, changed, native, step_of, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CUDA = torch.device("cuda", 0)
BLOCK = 16


def written(engine, module, requests):
    engine.update_weights(SharedModule(module), 0)
    samples = sorted(generate(engine, requests), key=lambda sample: sample.id)
    engine.sleep()
    return samples


def on_cuda(**options):
    return native(**{"device": CUDA, "max_length": 96, "max_num_seqs": 16, **options})


def assert_same(ours, others):
    for left, right in zip(ours, others, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        np.testing.assert_allclose(left.log_probs, right.log_probs, atol=2e-5)


@pytest.mark.parametrize("name", ["fused", "module", "hf"])
def test_cuda_writes_what_the_cpu_writes(name, tiny, make_requests):
    requests, runs = make_requests(20, 2, temperature=0.8, top_p=0.9), []
    for device in (CPU, CUDA):
        options = {"device": device, "max_length": 96, "max_num_seqs": 16}
        engine = HFEngine(**options) if name == "hf" else native(runner=name, attention="torch", **options)
        runs.append(tokens(written(engine, tiny(dtype=torch.float64).to(device), requests)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("runner", ["fused", "module"])
@pytest.mark.parametrize("model", ["qwen2", "qwen3", "mistral_window"])
def test_triton_attention_gives_the_log_probs_of_torch(runner, model, tiny, make_requests):
    requests, module = make_requests(20, 2, temperature=0.0), tiny(model).to(CUDA)
    names = ("triton", "torch")
    assert_same(*(written(on_cuda(attention=name, runner=runner), module, requests) for name in names))


def decode_step(lengths, generator):
    """Return a step with one token each, of sequences that will have these lengths and use every block."""
    rows, width = len(lengths), -(-max(lengths) // BLOCK)
    tables_SB = torch.randperm(rows * width, generator=generator).view(rows, width)
    ids = torch.randint(97, (rows,), generator=generator)
    return step_of(tables_SB.int().to(CUDA), lengths, [1] * rows, BLOCK, ids)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["fused", "module"])
def test_replayed_graphs_compute_what_plain_steps_do(name, tiny):
    runner = make_runner(name, tiny("qwen3").to(CUDA), 96)
    caches = [PagedCache(runner.layers, 20 * 6, BLOCK, runner.dtype, CUDA) for _ in range(2)]
    attention, plain = (make_attention(cache, "triton") for cache in caches)
    graphed = GraphedRunner(runner, attention, 20, 6, CudaCapture())
    generator = torch.Generator().manual_seed(0)
    for rows in (20, 3, 17, 1, 20):
        step = decode_step(torch.randint(1, 97, (rows,), generator=generator).tolist(), generator)
        with torch.inference_mode():
            expected = runner.forward(step, plain)
        torch.testing.assert_close(graphed.forward(step, attention), expected, rtol=1e-4, atol=1e-4)
    for left, right in zip(caches[0].keys, caches[1].keys, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("error")
def test_memory_that_is_given_back_is_free_and_comes_back_in_place():
    size = 2**30
    held = Lasting([((size,), torch.uint8), ((1000,), torch.float32)], CUDA)
    assert held.stays and lasting_bytes(CUDA) >= size
    numbers, out = held.tensors[1], torch.zeros(1000, device=CUDA)
    place = numbers.data_ptr()
    replay = CudaCapture()(lambda: out.copy_(2 * numbers))
    for value in range(3):
        numbers.fill_(value)
        replay()
        assert out.tolist() == [2.0 * value] * 1000
        taken = torch.cuda.mem_get_info(CUDA)[0]
        held.give_back()
        assert torch.cuda.mem_get_info(CUDA)[0] - taken >= size and lasting_bytes(CUDA) == 0
        torch.full((size // 4,), 7.0, device=CUDA)  # other tensors may use the memory meanwhile
        held.take()
        assert numbers.data_ptr() == place
    held.give_back()
    assert lasting_bytes(CUDA) == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_graphs_are_captured_once_for_all_versions(model, tiny, make_requests, monkeypatch):
    captured, capture = [], CudaCapture.__call__
    monkeypatch.setattr(CudaCapture, "__call__", lambda *args: (captured.append(1), capture(*args))[1])
    requests = make_requests(40, 2, temperature=0.0)
    engine, counts = on_cuda(max_num_seqs=32), []
    for version in range(3):
        module = changed(tiny(model), version).to(CUDA)  # at other addresses each time
        samples = written(engine, module, requests)
        counts.append(len(captured))
        assert_same(samples, written(on_cuda(max_num_seqs=32, enforce_eager=True), module, requests))
    assert counts[0] > 3 and counts == [counts[0]] * 3
    assert engine._steps._released is not None  # its copies have no memory and wait for weights


@pytest.mark.parametrize("what", ["run_ahead", "split_steps"])
def test_neither_running_ahead_nor_prompts_apart_change_anything(what, tiny, make_requests):
    requests, module, runs = make_requests(30, 2, temperature=0.0), tiny().to(CUDA), []
    for value in (True, False):
        engine = on_cuda(max_num_seqs=8, **({"run_ahead": value} if what == "run_ahead" else {}))
        if what == "split_steps":
            engine._split_steps = value
        runs.append(written(engine, module, requests))
    assert_same(*runs)


def check_attention(step, group, dim, dtype, limit):
    """Compare Triton's attention over a random cache with PyTorch's."""
    cache = PagedCache([LayerShape(2, dim, dim)], step.tables_GSB[0].numel(), BLOCK, dtype, CUDA)
    for part in (cache.keys[0], cache.values[0]):
        part.normal_()
    query_TND = torch.randn(len(step.ids_T), 2 * group, dim, device=CUDA, dtype=dtype) * dim**-0.5
    out, expected = (make_attention(cache, name).attend(0, step, query_TND) for name in ("triton", "torch"))
    assert (out.float() - expected.float()).norm() < limit * expected.float().norm()


@pytest.mark.parametrize("lengths", [[4000, 1, 777], [300] * 40])
@pytest.mark.parametrize(("group", "dim"), [(7, 64), (7, 128), (4, 128), (2, 256)])
def test_bfloat16_decoding_at_real_sizes(group, dim, lengths):
    check_attention(decode_step(lengths, torch.Generator().manual_seed(1)), group, dim, torch.bfloat16, 1e-2)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (1, 32), (7, 32), (7, 64), (4, 80), (7, 128), (2, 256)])
def test_prompts_at_every_head_size(group, dim, dtype, limit):
    counts, before = [1, 300, 17, 64, 6, 6, 129, 2], [0, 0, 250, 16, 0, 3, 1, 700]
    lengths = [sum(each) for each in zip(counts, before, strict=True)]
    width = -(-max(lengths) // BLOCK)
    generator = torch.Generator().manual_seed(dim + group)
    tables_SB = torch.randperm(len(counts) * width, generator=generator).view(len(counts), width)
    check_attention(step_of(tables_SB.int().to(CUDA), lengths, counts, BLOCK), group, dim, dtype, limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampling_at_a_real_vocabulary(dtype):
    rows, vocabulary = 64, 151_936
    logits = 2 * torch.randn(rows, vocabulary, device=CUDA, dtype=dtype)
    temperature, nothing = np.where(np.arange(rows) % 4, 0.8, 0.0), np.zeros(rows)
    params = RowParams.of(temperature, nothing.astype(np.int64), np.ones(rows), nothing, vocabulary, CUDA)
    uniforms = torch.rand(rows, dtype=torch.float64, device=CUDA)
    drawn, expected = sample(logits, uniforms, params), sample(logits.double(), uniforms, params)
    assert drawn.tokens_R.tolist() == expected.tokens_R.tolist()
    torch.testing.assert_close(drawn.log_probs_R.double(), expected.log_probs_R, rtol=1e-6, atol=1e-5)
