import io
import random
import struct
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.errors import CheckpointError, DataError
from tandem.unpickling import load_plain
from tests.support.evil import Runs, payloads


def again(thing: Any) -> Any:
    written = io.BytesIO()
    torch.save(thing, written)
    written.seek(0)
    return load_plain(written, refused=DataError, field="it")


def test_plain_values_come_back_as_they_were():
    plain = {"a": (1, "ü", None, float("inf")), 2: [1 << 200, b"", b"x"], "s": {1, 2}, "d": datetime.now(UTC)}
    plain |= {"decimal": Decimal("1.50"), "random": random.getstate(), "size": torch.Size([3])}
    assert again(plain) == plain


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.array(["ab", ""]),
        np.array([True, False]),
        np.zeros((0, 3)),
        np.array(5),
        np.asfortranarray(np.array([[1, "a"], [None, {"k": 2.5}]], dtype=object)),
    ],
)
def test_arrays_come_back_as_they_were(array):
    back = again([array, {"same": array}])
    assert type(back[0]) is np.ndarray and back[0] is back[1]["same"]
    assert back[0].dtype == array.dtype and back[0].shape == array.shape
    assert back[0].tolist() == array.tolist()
    back[0][...] = back[0].copy()  # it is writable


def test_arrays_within_arrays_and_the_states_of_generators():
    inner = np.empty(2, dtype=object)
    inner[:] = [np.arange(3), {"x": np.float64(0.1)}]
    back = again({"array": inner, "legacy": np.random.get_state(), "number": np.int64(7)})
    assert back["array"][0].tolist() == [0, 1, 2] and back["array"][1]["x"] == 0.1
    assert type(back["number"]) is np.int64
    np.random.RandomState().set_state(back["legacy"])
    generator, other = np.random.default_rng(5), np.random.default_rng()
    other.bit_generator.state = again(generator.bit_generator.state)
    assert other.random() == generator.random()


def test_tensors_come_back_with_their_types():
    tensors = [torch.arange(3), torch.tensor(0.1, dtype=torch.bfloat16), torch.zeros(0, 2)]
    for back, tensor in zip(again(tensors), tensors, strict=True):
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)


@pytest.mark.parametrize("kind", payloads(Path("canary")))
def test_nothing_in_a_file_is_called(kind, tmp_path):
    canary = tmp_path / "canary"
    torch.save(payloads(canary)[kind], tmp_path / "file.pt")
    with pytest.raises(CheckpointError) as caught:
        load_plain(tmp_path / "file.pt", refused=CheckpointError, field="file.pt")
    assert caught.value.field == "file.pt" and "weights_only" not in str(caught.value)
    assert not list(tmp_path.glob("canary*"))


class Dressed:
    """A numpy type with forged flags: numpy takes its objects for numbers."""

    def __reduce__(self) -> Any:
        return np.dtype, ("V8", False, True), (3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 1, 0)


@pytest.mark.parametrize(
    "forged",
    [
        Runs(np.array([1]).__reduce__()[0], np.ndarray, (0,), b"b"),
        Runs(np.float64(1).__reduce__()[0], np.dtype("O"), struct.pack("<q", 1)),
        Runs(np.float64(1).__reduce__()[0], Dressed(), struct.pack("<q", 1)),
    ],
)
def test_a_forged_array_is_refused(forged):
    """One has no content; the bytes of two others would be taken for addresses of objects."""
    with pytest.raises(DataError):
        again(forged)


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"not a file", b"\x80\x02K\x01.", b"PK\x03\x04" + bytes(40)]
)
def test_what_is_no_such_file_is_refused(content):
    with pytest.raises(DataError) as caught:
        load_plain(io.BytesIO(content), refused=DataError, field="it")
    assert caught.value.field == "it" and caught.value.got


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_plain(tmp_path / "none.pt", refused=DataError, field="it")
