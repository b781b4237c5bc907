import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from tandem.protocol import DataProto, Ragged

INTEGERS = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2]


def dumped(value):
    buffers = []
    return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def pickled(value, protocol=5):
    return pickle.loads(pickle.dumps(value, protocol=protocol))


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_type_survives(dtype, protocol):
    def some(*shape):
        return (torch.rand(shape) * 100 - (0 if dtype == torch.uint8 else 50)).to(dtype)

    ragged = {"ragged": ((5, 2), [2, 0, 3]), "empty": ((0, 2), [0, 0, 0])}
    columns = {name: Ragged.from_lengths(some(*shape), lengths) for name, (shape, lengths) in ragged.items()}
    batch = DataProto(columns | {"dense": some(3, 2, 2)}, {"uid": ["a", None, {"x": 1}]}, {"step": 3})
    back = pickled(batch, protocol)
    for name, column in back.batch.items():
        got, want = (c.values if isinstance(c, Ragged) else c for c in (column, batch.batch[name]))
        assert (got.dtype, got.shape) == (dtype, want.shape) and torch.equal(got.double(), want.double())
    for name in ragged:
        assert back.ragged(name).offsets.equal(batch.ragged(name).offsets)
    assert list(back.non_tensor_batch["uid"]) == ["a", None, {"x": 1}] and back.meta_info == {"step": 3}
    back.dense("dense")[0] = 1  # in-band tensors have their own memory
    assert len(pickled(DataProto(), protocol)) == 0


def test_out_of_band_values_lie_in_the_buffers_and_in_the_tensors_of_the_sender():
    batch = DataProto({"x": torch.arange(1000.0)[:2], "t": Ragged.from_lengths(torch.arange(50), [20, 30])})
    data, buffers = dumped(batch)
    assert len(data) < 600
    assert sum(len(buffer.raw()) for buffer in buffers) == 2 * 4 + 50 * 8 + 3 * 8
    places = {np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers}
    assert batch.ragged("t").values.data_ptr() in places  # pickling made no copy
    stored = [bytes(buffer.raw()) for buffer in buffers]
    del buffers  # the memory outlives them
    back = pickle.loads(data, buffers=stored)
    assert back.ragged("t").equal(batch.ragged("t"))
    places = {np.frombuffer(block, np.uint8).ctypes.data for block in stored}
    assert {back.ragged("t").values.data_ptr(), back.dense("x").data_ptr()} <= places  # nor did unpickling


def test_reading_from_read_only_memory_is_silent():
    program = """
import pickle, sys, warnings
warnings.simplefilter("error")
import torch
from tandem.protocol import DataProto
buffers = []
data = pickle.dumps(DataProto({"x": torch.arange(4)}), protocol=5, buffer_callback=buffers.append)
back = pickle.loads(data, buffers=[bytes(b.raw()) for b in buffers])
print(back.dense("x").tolist())
torch.from_numpy(__import__("numpy").frombuffer(b"12345678", "u1"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1, 2, 3]\n", done.stderr
    assert "not writable" in done.stderr  # PyTorch's own warning for such arrays still appears


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_view_travels_without_the_rest_of_its_storage(protocol):
    whole = Ragged.from_lengths(torch.zeros(100_000), [10] * 10_000)
    batch = DataProto({"t": whole, "x": torch.zeros(10_000, 8)})[20:24]
    assert len(pickle.dumps(batch, protocol=protocol)) < 1500
    assert len(pickle.dumps(batch.ragged("t"), protocol=protocol)) < 1000


def test_views_that_are_not_contiguous_and_gradients_that_stay_behind():
    table = torch.arange(24.0).view(4, 6)
    batch = DataProto({"columns": table[:, ::2], "turned": table[:, :4].T, "wide": table[:1].expand(4, 6)})
    back = pickled(batch)
    assert all(torch.equal(back.dense(name), column) for name, column in batch.batch.items())
    back = pickled(DataProto({"x": torch.ones(3, requires_grad=True) * 2}))
    assert back.dense("x").tolist() == [2, 2, 2] and not back.dense("x").requires_grad


def test_one_tensor_in_several_columns_travels_once():
    tokens = Ragged.from_lengths(torch.zeros(400), [100] * 4)
    batch = DataProto({"a": tokens, "b": tokens, "c": tokens.with_values(torch.ones(400))})
    assert sum(len(buffer.raw()) for buffer in dumped(batch)[1]) == 2 * 400 * 4 + 5 * 8
    back = pickled(batch)
    assert back.ragged("a").values is back.ragged("b").values
    assert back.ragged("a").offsets is back.ragged("c").offsets


def test_copies():
    batch = DataProto({"t": Ragged.from_list([[1], [2, 3]]), "x": torch.zeros(2)}, {"uid": ["a", "b"]})
    same = copy.copy(batch)
    assert same.dense("x") is batch.dense("x")
    assert copy.copy(batch.ragged("t")).values is batch.ragged("t").values
    same.pop(["x"], ["uid"])
    assert batch.columns == ("t", "x", "uid")
    for other in (copy.deepcopy(batch), batch.clone()):
        other.dense("x")[0] = other.ragged("t").values[0] = 9
        assert batch.dense("x").tolist() == [0, 0] and batch.ragged("t").values.tolist() == [1, 2, 3]
        assert other.ragged("t").row(1).tolist() == [2, 3]
