"""State that is offloaded to the host between updates stays bit-identical, in memory that is kept."""

import host_store_job
import pytest
import synthetic
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tandem.engines.train.host_store import HostStore, leaves
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
SHAPES = [(7, 5), (0,), (1,), (300,), (12, 2, 3)]


def drawn(seed, device="cpu"):
    draw = torch.Generator().manual_seed(seed)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        found += [torch.randn(shape, generator=draw).to(device, dtype) for shape in SHAPES]
    return [*found, torch.randint(0, 99, (11,), generator=draw, dtype=torch.uint8).to(device)]


def equal(found, wanted):
    assert len(found) == len(wanted)
    return all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
        for one, other in zip(found, wanted, strict=True)
    )


def apart(first, second):
    mine, others = (
        {t.untyped_storage().data_ptr() for t in tensors if t.numel()} for tensors in (first, second)
    )
    return mine.isdisjoint(others)


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
    assert torch.equal(found, torch.full((900,), 2.0))


def test_a_tensor_that_wraps_others_goes_in_parts():
    """An 8-bit tensor, for example, wraps codes and scales."""
    store = HostStore(CPU, limit=1)
    value = TwoTensor(torch.arange(6.0), torch.ones(6))
    (there,) = store.offload([value])
    assert isinstance(there, TwoTensor) and apart(leaves(there), leaves(value))
    (here,) = store.onload([there])
    assert equal([here.a, here.b], [torch.arange(6.0), torch.ones(6)])
    assert store.take()["onload"][1] == 2 * 256


@pytest.mark.parametrize("choice", host_store_job.CHOICES)
def test_updates_on_one_rank(folder, choice):
    found = host_store_job.rounds(folder, choice, synthetic.make_batch())
    check(found)


@pytest.mark.slow
def test_updates_on_two_ranks(folder, tmp_path):
    """The weights are sharded, and of some the second rank has fewer rows."""
    run_ranks(host_store_job.__file__, folder, tmp_path)
    for rank in (0, 1):
        for found in torch.load(tmp_path / f"{rank}.pt", weights_only=False).values():
            check(found)


def check(found):
    """Check that moving the state changes no weight and that each round uses the same host memory."""
    for moved, stayed in zip(found["moved"], found["stayed"], strict=True):
        assert all(torch.equal(value, stayed[name]) for name, value in moved.items())
    first, *others = found["memory"]
    assert first and all(memory == first for memory in others)
    assert all(torch.equal(value, found["moved"][-1][name]) for name, value in found["resumed"].items())


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
