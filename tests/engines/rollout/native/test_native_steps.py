"""Tests of graphs across weight versions.

Work that runs again replaces captured graphs, and the memory keeps its addresses as on CUDA.
"""

import gc
import weakref

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import SharedModule, WeightStream, generate
from tandem.engines.rollout.native import fused, lasting, steps
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.graphs import GraphedRunner
from tandem.engines.rollout.own_weights import OwnWeights
from tandem.engines.weight_sync import digest
from tandem.protocol import Request, SamplingParams

CPU = torch.device("cpu")


class Lent:
    """A `Region` on the host. Its content is lost when it is freed."""

    def __init__(self, size, device):
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.held = True

    def give_back(self):
        assert self.held
        self.held = False
        with torch.inference_mode():
            self.buffer.fill_(255)  # NaN

    def take(self):
        assert not self.held
        self.held = True


class Captures:
    """The captured sizes, in order. A replay asserts that all tensors are at their addresses."""

    def __init__(self):
        self.sizes = []
        self.replays = 0

    def graphed(self, runner, attention, *args):
        made = GraphedRunner(runner, attention, *args, capture=lambda work: self.capture(work, made))
        return made

    def capture(self, work, graphed):
        work()
        cells = (cell.cell_contents for cell in work.__closure__)
        self.sizes.append(dict(zip(work.__code__.co_freevars, cells, strict=True))["size"])
        places = graphed._places()

        def replay():
            assert graphed._places() == places
            self.replays += 1
            work()

        return replay


@pytest.fixture
def captures(monkeypatch):
    made = Captures()
    monkeypatch.setattr(steps, "GraphedRunner", made.graphed)
    return made


@pytest.fixture
def regions(monkeypatch):
    made = []

    def reserve(size, device):
        made.append(Lent(size, device))
        return made[-1]

    monkeypatch.setattr(lasting, "reserve", reserve)
    return made


def make(*, copies=True, **options):
    """Make an engine as on CUDA."""
    engine = NativeEngine(**{"device": CPU, "max_length": 128, "run_ahead": True, **options})
    engine._steps.graphs = engine._store.lasting = True
    engine._copies = lambda source, runner: copies
    return engine


def changed(module, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return module


def alone(module, requests):
    """Return what a fresh engine without graphs or copies generates."""
    engine = NativeEngine(device=CPU, max_length=128)
    engine.update_weights(SharedModule(module), 0)
    return tokens(generate(engine, requests))


def tokens(samples):
    return [sample.token_ids.tolist() for sample in samples]


def shown(engine, module, version, release=None):
    found = engine.update_weights(SharedModule(module, release), version)
    assert found == digest(module.named_parameters())


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_nothing_is_captured_again_through_sleep_and_new_weights(
    model, tiny, make_requests, captures, regions
):
    """The module's own memory is freed after copying, and comes back elsewhere with other weights."""
    requests, engine = make_requests(20, 2), make(max_num_seqs=8)
    module, written = tiny(model, torch.float64), []
    for version in range(3):
        mine = changed(tiny(model, torch.float64), version)
        gone = []

        def release(mine=mine, gone=gone):
            gone.append(True)
            with torch.no_grad():
                for parameter in mine.parameters():
                    parameter.fill_(torch.nan)

        expected = alone(mine, requests)
        module.load_state_dict(mine.state_dict())
        found = engine.update_weights(SharedModule(mine, release), version)
        assert found == digest(module.named_parameters()) and gone == [True]
        written.append(tokens(generate(engine, requests)))
        assert written[-1] == expected
        if version == 0:
            sizes = list(captures.sizes)
        engine.sleep()
        assert len(regions) == 2 and not any(region.held for region in regions)
    assert captures.sizes == sizes and len(set(sizes)) == len(sizes) > 2
    assert written[0] != written[1] != written[2]
    assert captures.replays > 3 * 20


def keeps_graphs_as_weights_change(engine, module, requests, captures):
    for version in range(3):
        shown(engine, changed(module, version), version)
        assert tokens(generate(engine, requests)) == alone(module, requests)
        if version == 0:
            sizes = list(captures.sizes)
    assert captures.sizes == sizes
    return sizes


def test_weights_updated_in_place_keep_their_graphs(tiny, make_requests, captures, regions, monkeypatch):
    """Without copies the module's own weights are read. Norms per head are joined in the runner's memory."""
    monkeypatch.setattr(fused, "_COPY_UP_TO_BYTES", 0)
    module, requests, engine = tiny("qwen3", torch.float64), make_requests(12, 2), make(copies=False)
    keeps_graphs_as_weights_change(engine, module, requests, captures)


def test_the_module_runner_keeps_graphs_too(tiny, make_requests, captures, regions):
    module, requests, engine = tiny("qwen2", torch.float64), make_requests(12, 2), make(runner="module")
    sizes = keeps_graphs_as_weights_change(engine, module, requests, captures)
    for parameter in module.parameters():  # as when FSDP gathers them again
        parameter.data = parameter.data.clone()
    shown(engine, module, 3)
    assert tokens(generate(engine, requests)) == alone(module, requests)
    assert len(captures.sizes) == 2 * len(sizes)


@pytest.mark.parametrize("moved", ["weights", "cache"])
def test_what_moves_is_captured_before_the_first_step(
    moved, tiny, make_requests, captures, regions, monkeypatch
):
    monkeypatch.setattr(fused, "_COPY_UP_TO_BYTES", 0)
    if moved == "cache":
        monkeypatch.setattr(lasting, "reserve", lambda size, device: None)
    requests, engine = make_requests(20, 2), make(copies=moved == "cache", max_num_seqs=16)
    first, second = changed(tiny("qwen2", torch.float64), 0), changed(tiny("qwen2", torch.float64), 1)
    shown(engine, first, 0)
    assert tokens(generate(engine, requests)) == alone(first, requests)
    sizes, captures.sizes = set(captures.sizes), []
    if moved == "cache":
        engine.sleep(["kv_cache"])
    shown(engine, second, 1)
    engine.submit(requests)
    engine.poll(0.0)
    assert set(captures.sizes) == sizes and len(captures.sizes) == len(sizes)
    done = {}
    while engine.pending():
        done |= {sample.id: sample for sample in engine.poll(1.0)}
    assert len(captures.sizes) == len(sizes)  # none is captured later
    assert tokens(done[request.id] for request in requests) == alone(second, requests)


def test_graphs_go_where_memory_cannot_stay(tiny, make_requests, captures, monkeypatch):
    """On a device without such memory, the freed memory of a sleeping engine includes that of the graphs."""
    engine = make()
    shown(engine, tiny("qwen2", torch.float64), 0)
    generate(engine, make_requests(4))
    engine.sleep()
    assert engine._steps._graphed is None and engine._steps._released is None
    assert engine._store.cache is None


def test_a_cache_that_grows_or_cannot_be_taken_again_is_another(
    tiny, make_requests, captures, regions, monkeypatch
):
    engine, module = make(), tiny("qwen2", torch.float64)
    few, many = make_requests(2, max_tokens=4), make_requests(30, max_tokens=30)
    shown(engine, module, 0)
    assert tokens(generate(engine, few)) == alone(module, few)
    small = engine._store.cache
    engine.sleep()
    shown(engine, module, 1)
    assert tokens(generate(engine, many)) == alone(module, many)
    large = engine._store.cache
    assert large.blocks > small.blocks
    engine.sleep()
    shown(engine, module, 2)
    assert tokens(generate(engine, few)) == alone(module, few)
    assert engine._store.cache is large
    engine.sleep()
    engine._store.room._budget = None
    monkeypatch.setattr(type(engine._store.room), "is_free", lambda room, size: size <= small.bytes)
    shown(engine, module, 3)
    assert tokens(generate(engine, few)) == alone(module, few)
    assert engine._store.cache.blocks == small.blocks


def test_a_cache_that_is_replaced_is_freed_first(tiny, make_requests, captures, regions, monkeypatch):
    """There may be no memory for both. The graphs over the old cache must not keep it alive."""
    engine, module = make(), tiny("qwen2", torch.float64)
    shown(engine, module, 0)
    generate(engine, make_requests(2, max_tokens=4))
    old, alive = weakref.ref(engine._store.cache), []
    engine.sleep(["kv_cache"])
    room = type(engine._store.room)

    def noted(room, needed):
        gc.collect()  # the captures in this test refer to each other
        alive.append(old() is not None)

    monkeypatch.setattr(room, "check_free", noted)
    generate(engine, make_requests(30, max_tokens=30))
    assert alive == [False]


def test_a_stream_fills_the_copies_in_place(tiny, make_requests, captures, regions, tmp_path):
    module, requests = tiny("qwen2", torch.float64), make_requests(12, 2)
    module.config.save_pretrained(tmp_path)
    own = OwnWeights(tmp_path, CPU)
    engine = make(own=own)
    for version in range(3):
        changed(module, version)
        stream = WeightStream((name, tensor.detach()) for name, tensor in module.named_parameters())
        assert engine.update_weights(stream, version) == digest(module.named_parameters())
        assert (
            sum(p.untyped_storage().nbytes() for p in own._module.parameters()) == 0
        )  # there is only one copy
        assert tokens(generate(engine, requests)) == alone(module, requests)
        if version == 0:
            sizes = list(captures.sizes)
        if version == 1:
            engine.sleep()
    assert captures.sizes == sizes


def test_weights_change_under_running_sequences(tiny, captures, regions):
    """The keys and values of running sequences stay, and so do the graphs."""
    from_scratch, engines = [], (make(), NativeEngine(device=CPU, max_length=128))
    first, second = tiny("qwen2", torch.float64), changed(tiny("qwen2", torch.float64), 3)
    for engine in engines:
        engine.update_weights(SharedModule(first), 0)
        engine.submit(requests_of(6))
        for _ in range(4):
            engine.poll(0.0)
        before = list(captures.sizes)
        engine.update_weights(SharedModule(second), 1)
        samples = {}
        while engine.pending():
            samples |= {sample.id: sample for sample in engine.poll(1.0)}
        assert {tuple(np.unique(sample.versions)) for sample in samples.values()} == {(0, 1)}
        from_scratch.append({id: sample.token_ids.tolist() for id, sample in samples.items()})
        assert captures.sizes[: len(before)] == before and len(set(captures.sizes)) == len(captures.sizes)
    assert from_scratch[0] == from_scratch[1]


def requests_of(count):
    return [Request(f"r{i}", 0, np.arange(1, 4 + i), SamplingParams(max_tokens=20)) for i in range(count)]
