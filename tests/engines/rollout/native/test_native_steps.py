"""Graphs across weight versions. Work that runs again at the same addresses replaces captured graphs."""

import gc
import weakref

import pytest
import torch

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native import fused, lasting, steps
from tandem.engines.rollout.native.graphs import GraphedRunner
from tandem.engines.rollout.own_weights import OwnWeights
from tandem.engines.weight_sync import digest
from tests.engines.rollout.case import CPU, changed, drain, native, request, stream, tokens


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


@pytest.fixture(autouse=True)
def captures(monkeypatch):
    made = Captures()
    monkeypatch.setattr(steps, "GraphedRunner", made.graphed)
    return made


@pytest.fixture
def regions(monkeypatch):
    made = []
    monkeypatch.setattr(lasting, "reserve", lambda *args: (made.append(Lent(*args)), made[-1])[1])
    return made


@pytest.fixture
def model(tiny):
    return tiny("qwen2", torch.float64)


def make(*, copies=True, **options):
    """Make an engine as on CUDA."""
    engine = native(run_ahead=True, **options)
    engine._steps.graphs = engine._store.lasting = True
    engine._copies = lambda source, runner: copies
    return engine


def alone(module, requests):
    return tokens(generate(native(module), requests))


def check(engine, source, module, version, requests):
    expected = alone(module, requests)
    held = digest(module.named_parameters())
    assert engine.update_weights(source, version) == held and tokens(generate(engine, requests)) == expected
    return expected


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_nothing_is_captured_again_through_sleep_and_new_weights(
    name, tiny, make_requests, captures, regions
):
    requests, engine, written, sizes = make_requests(20, 2), make(max_num_seqs=8), [], []
    for version in range(3):
        mine, same = (changed(tiny(name, torch.float64), version) for _ in range(2))
        gone = []

        def release(mine=mine, gone=gone):
            gone.append(True)
            with torch.no_grad():
                for parameter in mine.parameters():
                    parameter.fill_(torch.nan)

        written.append(check(engine, SharedModule(mine, release), same, version, requests))
        assert gone == [True]
        sizes = sizes or list(captures.sizes)
        engine.sleep()
        assert len(regions) == 2 and not any(region.held for region in regions)
    assert captures.sizes == sizes and len(set(sizes)) == len(sizes) > 2
    assert written[0] != written[1] != written[2]
    assert captures.replays > 3 * 20


@pytest.mark.parametrize("runner", ["fused", "module"])
def test_weights_updated_in_place_keep_their_graphs(
    runner, tiny, make_requests, captures, regions, monkeypatch
):
    """Without copies the module's own weights are read. Norms per head are joined in the runner's memory."""
    monkeypatch.setattr(fused, "PACK_UP_TO_BYTES", 0)
    model, requests, sizes = tiny("qwen3", torch.float64), make_requests(12, 2), []
    engine = make(copies=False, runner=runner)
    for version in range(3):
        check(engine, SharedModule(changed(model, version)), model, version, requests)
        sizes = sizes or list(captures.sizes)
    assert captures.sizes == sizes
    if runner == "module":
        for parameter in model.parameters():  # as when FSDP gathers them again
            parameter.data = parameter.data.clone()
        check(engine, SharedModule(model), model, 3, requests)
        assert len(captures.sizes) == 2 * len(sizes)


@pytest.mark.parametrize("moved", ["weights", "cache"])
def test_what_moves_is_captured_before_the_first_step(
    moved, tiny, make_requests, captures, regions, monkeypatch
):
    monkeypatch.setattr(fused, "PACK_UP_TO_BYTES", 0)
    if moved == "cache":
        monkeypatch.setattr(lasting, "reserve", lambda size, device: None)
    requests, engine = make_requests(20, 2), make(copies=moved == "cache", max_num_seqs=16)
    first, second = (changed(tiny("qwen2", torch.float64), seed) for seed in range(2))
    check(engine, SharedModule(first), first, 0, requests)
    sizes, captures.sizes = set(captures.sizes), []
    if moved == "cache":
        engine.sleep(["kv_cache"])
    engine.update_weights(SharedModule(second), 1)
    engine.submit(requests)
    engine.poll(0.0)
    assert set(captures.sizes) == sizes and len(captures.sizes) == len(sizes)
    done = drain(engine)
    assert len(captures.sizes) == len(sizes)  # none is captured later
    assert tokens(done[each.id] for each in requests) == alone(second, requests)


def test_graphs_go_where_memory_cannot_stay(model, make_requests):
    """On a device without such memory, the freed memory of a sleeping engine includes that of the graphs."""
    engine = make()
    check(engine, SharedModule(model), model, 0, make_requests(4))
    engine.sleep()
    assert engine._steps._graphed is None and engine._steps._released is None
    assert engine._store.cache is None


def test_a_cache_that_grows_or_cannot_be_taken_again_is_another(model, make_requests, regions, monkeypatch):
    engine, caches = make(), []
    few, many = make_requests(2, max_tokens=4), make_requests(30, max_tokens=30)
    for version, requests in enumerate((few, many, few, few)):
        if version == 3:
            engine._store.room._budget = None
            room = type(engine._store.room)
            monkeypatch.setattr(room, "is_free", lambda room, size: size <= caches[0].bytes)
        check(engine, SharedModule(model), model, version, requests)
        caches.append(engine._store.cache)
        engine.sleep()
    assert caches[1].blocks > caches[0].blocks == caches[3].blocks and caches[2] is caches[1]


def test_a_cache_that_is_replaced_is_freed_first(model, make_requests, regions, monkeypatch):
    """There may be no memory for both. The graphs over the old cache must not keep it alive."""
    engine = make()
    check(engine, SharedModule(model), model, 0, make_requests(2, max_tokens=4))
    old, alive = weakref.ref(engine._store.cache), []
    engine.sleep(["kv_cache"])

    def noted(room, needed):
        gc.collect()  # the captures in this test refer to each other
        alive.append(old() is not None)

    monkeypatch.setattr(type(engine._store.room), "check_free", noted)
    generate(engine, make_requests(30, max_tokens=30))
    assert alive == [False]


def test_a_stream_fills_the_copies_in_place(model, make_requests, captures, regions, tmp_path):
    model.config.save_pretrained(tmp_path)
    own, requests = OwnWeights(tmp_path, CPU), make_requests(12, 2)
    engine, sizes = make(own=own), []
    for version in range(3):
        check(engine, stream(changed(model, version)), model, version, requests)
        left = sum(parameter.untyped_storage().nbytes() for parameter in own._module.parameters())
        assert left == 0  # there is only one copy
        sizes = sizes or list(captures.sizes)
        if version == 1:
            engine.sleep()
    assert captures.sizes == sizes


def test_weights_change_under_running_sequences(model, tiny, captures, regions):
    second, written = changed(tiny("qwen2", torch.float64), 3), []
    for engine in (make(), native()):
        engine.update_weights(SharedModule(model), 0)
        engine.submit([request(f"r{i}", prompt=3 + i, max_tokens=20) for i in range(6)])
        for _ in range(4):
            engine.poll(0.0)
        before = list(captures.sizes)
        engine.update_weights(SharedModule(second), 1)
        samples = drain(engine)
        assert {tuple(sorted(set(sample.versions))) for sample in samples.values()} == {(0, 1)}
        written.append({id: sample.token_ids.tolist() for id, sample in samples.items()})
        assert captures.sizes[: len(before)] == before and len(set(captures.sizes)) == len(captures.sizes)
    assert written[0] == written[1]
