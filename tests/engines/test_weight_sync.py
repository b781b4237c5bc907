"""Tests of checksums, of what digests detect, and of the layout of buckets."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch

from tandem.engines import weight_sync
from tandem.engines.weight_sync import Arrival, Sent, WeightBucket, WeightSyncError, checksum, digest

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8)
SHAPES = ((5, 8), (7, 3), (6,), (3, 4, 8), (2, 3, 5), (), (0, 8), (1, 1))


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (50 * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)


def slow_checksum(tensor: torch.Tensor) -> int:
    """Compute the checksum by its definition, with Python's integers."""
    row = tensor.shape[-1] if tensor.dim() > 1 else 1
    data, size = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), tensor.element_size()
    word = 8 if row * size % 8 == 0 else size
    kind = np.dtype(f"<{'u' if size == 1 and word == 1 else 'i'}{word}")
    words = [int(value) for value in np.frombuffer(data, kind)]
    per_row = row * size // word
    total = sum((2 * (i // per_row) + 1) * value for i, value in enumerate(words))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_checksum_is_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random(shape, dtype)
    assert int(checksum(tensor)) == slow_checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 16), (7, 3), (9,), (5, 3, 2), (2, 3, 8)])
def test_checksums_of_shards_and_of_columns_add_up(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The columns may be cut anywhere, even inside words of 8 bytes."""
    tensor = random(shape, dtype)
    per_entry = int(np.prod(shape[1:-1]))
    for cut in range(shape[0] + 1):
        parts = checksum(tensor[:cut]) + checksum(tensor[cut:], cut * per_entry)
        assert int(parts) == int(checksum(tensor))
    for cut in range(1, shape[-1] if len(shape) > 1 else 1):
        left = checksum(tensor[..., :cut], columns=shape[-1])
        right = checksum(tensor[..., cut:], first_column=cut, columns=shape[-1])
        assert int(left + right) == int(checksum(tensor))


def test_slices_and_transposes_are_read_as_what_they_hold() -> None:
    fused = random((9, 4), torch.bfloat16)
    assert int(checksum(fused[3:7])) == int(checksum(fused[3:7].clone()))
    flat = random((37,), torch.bfloat16)
    assert int(checksum(flat[1:].view(9, 4))) == int(checksum(flat[1:].clone().view(9, 4)))
    assert int(checksum(fused.T)) == int(checksum(fused.T.contiguous())) != int(checksum(fused))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_single_changed_bit_and_any_exchange_of_rows_is_found(dtype: torch.dtype) -> None:
    tensor = random((6, 8), dtype)
    original = int(checksum(tensor))
    flat = tensor.view(-1).view(torch.uint8)
    for byte in range(len(flat)):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert int(checksum(tensor)) != original, (byte, bit)
            flat[byte] ^= 1 << bit
    for first in range(6):
        for second in range(first):
            order = list(range(6))
            order[first], order[second] = second, first
            assert int(checksum(tensor[order])) != original


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: random((4, 8), torch.bfloat16, 10 * seed + i) for i, name in enumerate("abcde")}


def arrive(held: dict[str, torch.Tensor], before: Sent | None = None) -> None:
    weight_sync.check_arrival(
        Sent(4, digest(weights(1).items())), digest(held.items()), engine="test", before=before
    )


def test_weights_that_arrived_pass() -> None:
    arrive(weights(1))
    arrive({name: tensor.clone() for name, tensor in reversed(weights(1).items())})


def test_a_wrong_tensor_is_named_with_what_became_of_it() -> None:
    good, old = weights(1), weights(0)
    before = Sent(3, digest(old.items()))
    damaged = good["c"].clone()
    damaged[2, 3] += 1
    sums = {name: f"{value % 2**64:016x}" for name, value in digest(good.items()).items()}
    skipped = {name: tensor for name, tensor in good.items() if name != "e"}
    cases: list[tuple[dict[str, torch.Tensor], list[str], list[str]]] = [
        (good | {"b": old["b"]}, ["b"], ["is still that of version 3"]),
        (good | {"c": damaged}, ["c"], ["damaged"]),
        (good | {"c": good["c"].flip(0)}, ["c"], ["damaged"]),
        (good | {"a": good["d"], "d": good["a"]}, ["a", "d"], ["the weight d", "the weight a"]),
        (skipped, ["e"], ["e is missing"]),
        (good | {"f": damaged}, ["f"], ["f was never sent"]),
    ]
    for held, names, told in cases:
        with pytest.raises(WeightSyncError) as caught:
            arrive(held, before)
        error = caught.value
        assert error.message.startswith(f"{len(names)} of 5 weights of version 4") and error.field == names[0]
        assert all(text in str(error.got) for text in told), error.got
        assert all(f"{name} {sums.get(name, 'nothing')}" in str(error.expected) for name in names)
        assert pickle.loads(pickle.dumps(error)).got == error.got


def test_of_many_wrong_tensors_three_are_named() -> None:
    with pytest.raises(WeightSyncError) as caught:
        arrive(weights(0), Sent(3, digest(weights(0).items())))
    assert str(caught.value.got).count("still that of version 3") == 3
    assert str(caught.value.got).endswith("and 2 more")


def test_buckets_hold_everything_once_in_order_within_their_limit() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        sizes = {f"w{i}": int(size) for i, size in enumerate(draw.integers(0, 60, size=draw.integers(1, 12)))}
        packed = weight_sync.buckets(sizes, 50)
        assert [name for names in packed for name in names] == list(sizes)
        totals = [sum(sizes[name] for name in names) for names in packed]
        for names, total in zip(packed, totals, strict=True):
            assert total <= 50 or len([name for name in names if sizes[name]]) == 1
        for names, following in itertools.pairwise(packed):
            assert sum(sizes[name] for name in names) + sizes[following[0]] > 50


def bucket(number: int, count: int, version: int = 2) -> WeightBucket:
    return WeightBucket(number, count, version, {}, Sent(version, {}) if number == count - 1 else None)


def test_buckets_come_each_once_in_order_and_of_one_version() -> None:
    arrival = Arrival()
    for _ in range(2):
        for number in range(3):
            arrival.expect(bucket(number, 3))
    for wrong in (bucket(0, 3), bucket(2, 3), bucket(1, 3, version=3)):
        arrival = Arrival()
        arrival.expect(bucket(0, 3))
        with pytest.raises(WeightSyncError, match="out of order"):
            arrival.expect(wrong)


def test_a_bucket_travels_with_its_tensors() -> None:
    tensors = weights(1)
    sent = WeightBucket(0, 1, 7, tensors, Sent(7, digest(tensors.items())))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == len(tensors) and len(data) < 2000
    found = pickle.loads(data, buffers=buffers)
    assert (found.number, found.count, found.version, found.sent) == (0, 1, 7, sent.sent)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
