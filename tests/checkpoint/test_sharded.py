import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from tandem.checkpoint.sharded import ShardReader, load_shards
from tandem.checkpoint.weights import read_weights
from tandem.errors import CheckpointError
from tests.support.evil import Runs, payloads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def written(folder, **more):
    model = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save({"model": model, **more}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def shards(tmp_path):
    return written(tmp_path / "shards")


def contents(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def refused(folder, thing, read=ShardReader):
    """Return the error after the table of contents became this thing, pickled unless it is bytes."""
    (folder / ".metadata").write_bytes(thing if isinstance(thing, bytes) else pickle.dumps(thing))
    with pytest.raises(CheckpointError) as caught:
        dict(read_weights(folder)) if read is read_weights else read(folder)
    return caught.value


def test_tensors_and_plain_values_are_read(tmp_path):
    plain = {"rate": 0.5, "names": ["a"]}
    folder = written(tmp_path / "shards", plain=plain, complex=torch.zeros(1, dtype=torch.cfloat))
    read = dict(read_weights(folder))
    assert read["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and read["b"].dtype == torch.bfloat16
    state = {"plain": {"rate": 0.0, "names": [""]}}
    load_shards(state, folder, alone=True)
    assert state == {"plain": plain}


class AnAttribute:
    def __reduce__(self):
        return getattr, (Path, "home")


def test_a_member_of_an_enumeration_may_be_written_as_an_attribute(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle a member of an enumeration as a call of `getattr`."""
    by_name = lambda member, _: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    folder = written(tmp_path / "shards")
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert dict(read_weights(folder))["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    refused(folder, AnAttribute())


@pytest.mark.parametrize("kind", payloads(Path("canary")))
def test_neither_a_table_of_contents_nor_an_entry_calls_anything(kind, shards, tmp_path):
    evil, true = payloads(tmp_path / "canary")[kind], contents(shards)
    for thing in (evil, Metadata({"model.w": evil}, None, {}), [true, evil]):
        assert refused(shards, thing, read_weights).field == str(shards / ".metadata")
    folder = written(tmp_path / "entry", step=evil)
    with pytest.raises(BaseException, match="step"):  # PyTorch's CheckpointException is a BaseException
        load_shards({"step": 0}, folder, alone=True)
    assert not list(tmp_path.glob("canary*"))


THINGS = [None, 1, [], {}, Metadata({}, None, None), Metadata(None, None, {}), Metadata({}, None, {0: 1})]
BYTES = [b"", b"\x80", b"cos\nsystem\n(S'true'\ntR.", b"junk"]


@pytest.mark.parametrize("thing", THINGS + BYTES)
def test_what_is_no_table_of_contents_is_refused(thing, shards):
    refused(shards, thing)


@pytest.mark.parametrize("place", ["../other.distcp", "/etc/passwd", "a/b"])
def test_files_outside_of_the_folder_are_not_read(place, shards):
    table = contents(shards)
    next(iter(table.storage_data.values())).relative_path = place
    assert place in str(refused(shards, table).got)


def test_a_tensors_bytes_that_run_code_are_refused(shards, tmp_path):
    table, canary = contents(shards), tmp_path / "canary"
    torch.save(Runs(os.system, f"touch {canary}"), shards / "evil.distcp")
    for place in table.storage_data.values():
        size = (shards / "evil.distcp").stat().st_size
        place.relative_path, place.offset, place.length = "evil.distcp", 0, size
    assert "weights_only" not in str(refused(shards, table, read_weights))
    assert not canary.exists()
