from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from tandem.checkpoint.sharded import ShardReader, load_shards
from tandem.checkpoint.weights import read_weights
from tandem.errors import CheckpointError
from tests.support.evil import Runs, payloads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def written(folder: Path, **more: Any) -> Path:
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)},
        **more,
    }
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_tensors_and_plain_values_are_read(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "shards", plain={"rate": 0.5, "names": ["a"]}, complex=torch.zeros(1, dtype=torch.cfloat)
    )
    read = dict(read_weights(folder))
    assert read["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and read["b"].dtype == torch.bfloat16
    state: dict[str, Any] = {"plain": {"rate": 0.0, "names": [""]}}
    load_shards(state, folder, alone=True)
    assert state == {"plain": {"rate": 0.5, "names": ["a"]}}


class AnAttribute:
    def __reduce__(self) -> Any:
        return getattr, (Path, "home")


def test_a_member_of_an_enumeration_may_be_written_as_an_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3 pickle a member of an enumeration as a call of `getattr`."""
    by_name = lambda member, _: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    folder = written(tmp_path / "shards")
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert dict(read_weights(folder))["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    (folder / ".metadata").write_bytes(pickle.dumps(AnAttribute()))
    with pytest.raises(CheckpointError):
        ShardReader(folder)


@pytest.mark.parametrize("kind", payloads(Path("canary")))
def test_a_table_of_contents_calls_nothing(kind: str, tmp_path: Path) -> None:
    folder, canary = written(tmp_path / "shards"), tmp_path / "canary"
    evil = payloads(canary)[kind]
    true = pickle.loads((folder / ".metadata").read_bytes())
    for thing in (evil, Metadata({"model.w": evil}, None, {}), [true, evil]):
        (folder / ".metadata").write_bytes(pickle.dumps(thing))
        with pytest.raises(CheckpointError) as caught:
            dict(read_weights(folder))
        assert caught.value.field == str(folder / ".metadata")
    assert not list(tmp_path.glob("canary*"))


@pytest.mark.parametrize("kind", payloads(Path("canary")))
def test_an_entry_that_is_no_tensor_calls_nothing(kind: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    folder = written(tmp_path / "shards", step=payloads(canary)[kind])
    with pytest.raises(BaseException, match="step"):  # PyTorch's CheckpointException is a BaseException
        load_shards({"step": 0}, folder, alone=True)
    assert not list(tmp_path.glob("canary*"))


@pytest.mark.parametrize(
    "thing", [None, 1, [], {}, Metadata({}, None, None), Metadata(None, None, {}), Metadata({}, None, {0: 1})]
)
def test_what_is_no_table_of_contents_is_refused(thing: Any, tmp_path: Path) -> None:
    folder = written(tmp_path / "shards")
    (folder / ".metadata").write_bytes(pickle.dumps(thing))
    with pytest.raises(CheckpointError):
        ShardReader(folder)


@pytest.mark.parametrize("content", [b"", b"\x80", b"cos\nsystem\n(S'true'\ntR.", b"junk"])
def test_bytes_that_are_no_pickle_are_refused(content: bytes, tmp_path: Path) -> None:
    folder = written(tmp_path / "shards")
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError):
        ShardReader(folder)


@pytest.mark.parametrize("place", ["../other.distcp", "/etc/passwd", "a/b"])
def test_files_outside_of_the_folder_are_not_read(place: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "shards")
    contents = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(contents.storage_data.values())).relative_path = place
    (folder / ".metadata").write_bytes(pickle.dumps(contents))
    with pytest.raises(CheckpointError) as caught:
        ShardReader(folder)
    assert place in str(caught.value.got)


def test_a_tensors_bytes_that_run_code_are_refused(tmp_path: Path) -> None:
    folder, canary = written(tmp_path / "shards"), tmp_path / "canary"
    contents = pickle.loads((folder / ".metadata").read_bytes())
    with (folder / "evil.distcp").open("wb") as file:
        torch.save(Runs(os.system, f"touch {canary}"), file)
    for place in contents.storage_data.values():
        size = (folder / "evil.distcp").stat().st_size
        place.relative_path, place.offset, place.length = "evil.distcp", 0, size
    (folder / ".metadata").write_bytes(pickle.dumps(contents))
    with pytest.raises(CheckpointError) as caught:
        dict(read_weights(folder))
    assert "weights_only" not in str(caught.value)
    assert not canary.exists()
