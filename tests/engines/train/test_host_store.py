"""State that is offloaded to the host between updates stays bit-identical, in memory that is kept."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

from tandem.engines.train.host_store import HostStore, leaves
from tests.engines.train import optimizer_case, synthetic
from tests.engines.train.on_ranks import gathered, on_ranks, seven_or_three

CHOICES = ("adamw", "foreach", "muon", "adamw_cpu")
CPU = torch.device("cpu")
SHAPES = [(7, 5), (0,), (1,), (300,), (12, 2, 3)]


def drawn(seed, device="cpu"):
    draw, dtypes = torch.Generator().manual_seed(seed), (torch.float32, torch.bfloat16, torch.float32)
    found = [torch.randn(shape, generator=draw).to(device, dtype) for dtype in dtypes for shape in SHAPES]
    return [*found, torch.randint(0, 99, (11,), generator=draw, dtype=torch.uint8).to(device)]


def equal(found, wanted):
    pairs = [(one.cpu(), other.cpu()) for one, other in zip(found, wanted, strict=True)]
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def apart(first, second):
    places = [{t.untyped_storage().data_ptr() for t in part if t.numel()} for part in (first, second)]
    return places[0].isdisjoint(places[1])


@pytest.mark.parametrize("limit", [1, 1000, 1 << 20])
def test_tensors_go_and_come_bit_for_bit(limit):
    store, here = HostStore(CPU, limit=limit), drawn(0)
    addresses = []
    for _ in range(3):
        wanted = [tensor.clone() for tensor in here]
        there = store.offload(here)
        assert store.holds and equal(there, wanted) and apart(there, here)
        for tensor in here:
            tensor.zero_()
        here = store.onload(there)
        assert not store.holds and equal(here, wanted) and apart(here, there)
        for tensor in here:
            tensor.add_(1)  # an update
        addresses.append([buffer.data_ptr() for buffer in store.buffers])
    assert addresses[0] == addresses[1] == addresses[2]
    seconds, nbytes = store.take()["offload"]
    assert seconds > 0 and nbytes >= 3 * sum(tensor.nbytes for tensor in here)
    assert store.take() == {"offload": (0.0, 0), "onload": (0.0, 0)}


def test_few_copies_carry_many_tensors():
    """From the second time on there is one copy per type and buffer. The first time copies each tensor."""
    store, here = HostStore(CPU), drawn(1)
    layout = store._laid_out(here)
    assert [dtype for dtype, _ in layout.buffers] == [torch.float32, torch.bfloat16, torch.uint8]
    assert len(layout.pairs(store.buffers, here)) == len(here)
    here = store.onload(store.offload(here))
    assert len(layout.pairs(store.buffers, here)) == 3
    here[0] = here[0].clone()  # one fp32 tensor no longer lies in its buffer
    assert len(layout.pairs(store.buffers, here)) == 2 * len(SHAPES) + 2
    assert all(tensor.storage_offset() * tensor.itemsize % 256 == 0 for tensor in store.offload(here))


def test_buffers_are_no_larger_than_the_limit_or_one_tensor():
    store = HostStore(CPU, limit=2000)
    store.offload([torch.zeros(size) for size in (100, 100, 900, 30, 400)])
    assert [buffer.nbytes for buffer in store.buffers] == [1024, 3840, 256, 1792]
    store = HostStore(CPU, limit=2000)
    store.offload([torch.zeros(size) for size in (64, 64, 64)])
    assert [len(buffer) for buffer in store.buffers] == [192]


def test_other_tensors_get_other_memory():
    store = HostStore(CPU)
    store.onload(store.offload([torch.ones(5)]))
    (found,) = store.offload([torch.full((900,), 2.0)])
    assert found.tolist() == [2.0] * 900


def test_tensors_that_changed_places_keep_their_values():
    store = HostStore(CPU)
    here = store.onload(store.offload([torch.ones(4), torch.zeros(4)]))
    assert equal(store.offload(here[::-1]), [torch.zeros(4), torch.ones(4)])


def test_a_tensor_that_wraps_others_goes_in_parts():
    """An 8-bit tensor, for example, wraps codes and scales."""
    store = HostStore(CPU, limit=1)
    value = TwoTensor(torch.arange(6.0), torch.ones(6))
    (there,) = store.offload([value])
    assert isinstance(there, TwoTensor) and apart(leaves(there), leaves(value))
    (here,) = store.onload([there])
    assert equal([here.a, here.b], [torch.arange(6.0), torch.ones(6)])
    assert store.take()["onload"][1] == 2 * 256


def rounds(folder, choice):
    """Check that moving the state changes no weight, and that each round uses the same host memory."""
    batch, optim = seven_or_three(synthetic.make_batch()), optimizer_case.CHOICES[choice]
    moved, stays, resumed = (synthetic.make_engine(folder, optim=optim) for _ in range(3))
    state, whole, memory = moved._state, {"parameters": True, "optimizer": True}, []
    state.offload(**whole)
    for _ in range(3):
        state.onload(parameters=True, optimizer=False)  # log-probs need only the parameters
        synthetic.output(moved, batch)
        state.offload(**whole)
        state.onload(**whole)
        for engine in (moved, stays):
            synthetic.train(engine, batch)
        for _ in range(2):
            state.offload(**whole)
        assert synthetic.same(synthetic.weights(moved), synthetic.weights(stays))
        stores = (state._parameters_host, state._optimizer_host)
        memory.append([buffer.data_ptr() for store in stores for buffer in store.buffers])
    assert memory[0] and memory == memory[:1] * 3
    with tempfile.TemporaryDirectory() as path:  # saved while the whole state is on the host
        path = Path(gathered(path)[0])
        moved.save(path)
        resumed.load(path)
        dist.barrier()
    assert synthetic.same(synthetic.weights(resumed), synthetic.weights(stays))


def rounds_of_all(folder):
    for choice in CHOICES:
        rounds(folder, choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_updates_on_one_rank(folder, choice):
    rounds(folder, choice)


@pytest.mark.slow
def test_updates_on_two_ranks(folder):
    on_ranks(rounds_of_all, folder)


@pytest.mark.gpu
def test_on_cuda():
    """The host memory is page-locked and allocated once, and the device memory is freed."""
    device = torch.device("cuda")
    store, here = HostStore(device), [torch.randn(1 << 22, device=device) for _ in range(8)]
    addresses = []
    for _ in range(3):
        wanted, before = [tensor.cpu() for tensor in here], torch.cuda.memory_allocated()
        there = store.offload(here)
        here = []
        assert torch.cuda.memory_allocated() <= before - 8 * (4 << 22)
        assert equal(there, wanted) and all(buffer.is_pinned() for buffer in store.buffers)
        addresses.append([buffer.data_ptr() for buffer in store.buffers])
        here = [tensor.mul_(2) for tensor in store.onload(there)]  # immediately, on the computation's stream
        assert equal(here, [2 * tensor for tensor in wanted])
    assert addresses[0] == addresses[1] == addresses[2]
    taken = store.take()
    assert all(seconds > 0 and nbytes == 3 * 8 * (4 << 22) for seconds, nbytes in taken.values())
