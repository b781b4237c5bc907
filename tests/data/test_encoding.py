import json
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as pa_feather
import pyarrow.parquet as pq
import pytest
import torch

from tandem.data import encoding
from tandem.data import files as files_module
from tandem.data import formats as formats_module
from tandem.data.cache import entry
from tandem.data.files import read_files
from tandem.data.forms import PromptForm
from tandem.data.loader import BatchLoader
from tandem.data.mixture import EpochOrder, MixedOrder
from tandem.data.prompts import PromptDataset
from tandem.data.sft import SFTDataset
from tandem.errors import DataError
from tandem.lifetime import UNUSED_SECONDS
from tests.data.cases import prompt_row
from tests.support.refusing import refused


@pytest.fixture
def large(monkeypatch):
    """Make every file count as large, and ten rows as much work."""
    monkeypatch.setattr(files_module, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(encoding, "PART_ROWS", 10)


def rows_of(count):
    return [
        prompt_row(f"{'ab' * (n % 11)}+{n}=", str(n), source="xyz"[n % 3 if n % 4 else 0], level=n)
        for n in range(count)
    ]


def uids_of(loader, count):
    return [uid for _ in range(count) for uid in loader.next().non_tensor_batch["uid"]]


def orders(dataset):
    weights = {"x": 0.5, "y": 0.3, "z": 0.2}
    places = dataset.places_of_sources(tuple(weights))
    return EpochOrder(shuffle=True, seed=7), MixedOrder(weights, places, shuffle=True, seed=7)


@pytest.mark.slow
def test_data_go_on_at_any_position_with_any_number_of_workers(files, tokenizer, tmp_path, monkeypatch):
    limits = {"max_prompt_length": 33, "filter_overlong_prompts": True}
    rows = rows_of(150)
    path = files.parquet(rows)
    small = PromptDataset(path, tokenizer, **limits)
    assert 0 < small.dropped < 40
    grown = PromptDataset(files.parquet(rows_of(190), "grown.parquet"), tokenizer, **limits)
    monkeypatch.setattr(files_module, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(encoding, "PART_ROWS", 10)
    drawn = random.Random(3)
    positions = [drawn.randrange(60) for _ in range(20)]
    for kind in range(2):
        whole = uids_of(BatchLoader(small, 8, orders(small)[kind]), 80)
        longer = BatchLoader(grown, 8, orders(grown)[kind])
        for workers in (1, 2, 3):
            dataset = PromptDataset(
                path, tokenizer, workers=workers, cache_dir=str(tmp_path / str(workers)), **limits
            )
            assert torch.equal(dataset.tokens.values, small.tokens.values)
            assert torch.equal(dataset.tokens.offsets, small.tokens.offsets)
            assert np.array_equal(dataset.digests, small.digests)
            for position in positions:
                first, second = (BatchLoader(dataset, 8, orders(dataset)[kind]) for _ in range(2))
                first.used = position
                second.load_state_dict(first.state_dict())
                assert uids_of(second, 4) == whole[8 * position : 8 * position + 32]
                longer.load_state_dict(first.state_dict())
                ends = -(-position // first.steps_per_epoch) * first.steps_per_epoch
                assert uids_of(longer, 2) == whole[8 * position : 8 * position + 16] or ends - position < 2
                longer.used = ends
                later = uids_of(longer, longer.steps_per_epoch) if position == positions[workers] else []
                assert not later or max(int(uid.partition("-")[2]) for uid in later) >= 150
                assert not set(later) & set(whole[: 8 * ends])


@pytest.mark.usefixtures("large")
def test_every_format_is_mapped_and_reads_as_before(files, tmp_path, monkeypatch):
    monkeypatch.setattr(formats_module, "BLOCK_BYTES", 400)
    rows = rows_of(30)
    rows[-1]["extra_info"]["note"] = "late"  # a nested column that the first blocks lack
    table = pa.Table.from_pylist(rows)
    paths = [files.parquet(rows), files.text("\n".join(map(json.dumps, rows)) + "\n\n", "rows.jsonl")]
    paths.append(files.text(json.dumps(rows), "rows.json"))
    for compression in ("lz4", "uncompressed"):
        paths.append(str(tmp_path / f"{compression}.feather"))
        pa_feather.write_feather(table, paths[-1], compression=compression)
    paths.append(str(tmp_path / "coded.parquet"))
    coded = table.set_column(0, "data_source", table["data_source"].dictionary_encode())
    pq.write_table(coded, paths[-1], row_group_size=7)
    cache = str(tmp_path / "cache")
    for path in paths:
        found, plain = (read_files(path, ["prompt"], optional=None, cache_dir=each) for each in (cache, None))
        (arrow,) = found.arrow
        assert (str(arrow) == path) == ("uncompressed" in path)
        assert found.table.to_pylist() == plain.table.to_pylist()
        assert found.take([29, 0, 11, 0]) == [plain.take([row])[0] for row in (29, 0, 11, 0)]
    several = read_files(paths[:3], ["prompt"], optional=None, cache_dir=cache)
    assert len(several) == 90 and several.where(61) == "rows.json row 1"
    assert several.take([61]) == read_files(paths[2], ["prompt"], optional=None).take([1])
    csv = files.text("prompt,n\n" + "".join(f"p{n},{n if n < 99 else 'x'}\n" for n in range(100)), "a.csv")
    late = read_files(csv, ["prompt"], optional=None, cache_dir=cache)
    assert late.arrow and late.take([99, 3]) == [{"prompt": "p99", "n": "x"}, {"prompt": "p3", "n": "3"}]
    first = read_files(paths[0], ["prompt"], max_samples=4, cache_dir=cache)
    assert (len(first), first.columns) == (4, ["prompt"])


@pytest.mark.usefixtures("large")
def test_what_was_made_is_taken_until_anything_changes(files, tokenizer, tmp_path, capfd):
    cache = tmp_path / "cache"
    path = files.parquet(rows_of(20))

    def made(**options):
        PromptDataset(path, tokenizer, cache_dir=str(cache), **{"workers": 1, **options})
        said = capfd.readouterr().err.splitlines()
        return [line.split()[1] for line in said if " written to the cache" in line]

    assert made() == ["rows", "tokens"]
    assert made() == [] and made(workers=None) == []
    assert made(max_prompt_length=500) == ["tokens"]
    assert made(chat_template_kwargs={"think": True}) == ["tokens"]
    assert made(form=PromptForm(answer_key="ability")) == ["rows", "tokens"]
    tokenizer.chat_template += "x"
    assert made() == ["tokens"]
    stamp = os.stat(path)
    shutil.copy2(path, tmp_path / "moved.parquet")
    path = str(tmp_path / "moved.parquet")
    assert made() == []  # the same file in another folder
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert made() == ["rows", "tokens"]
    assert not list(cache.glob(".building*"))
    path = files.parquet([{"prompt": "x" * n, "response": "y"} for n in range(1, 30)], "sft.parquet")
    dataset = SFTDataset(path, tokenizer, cache_dir=str(cache), workers=1)
    assert dataset.response_mask.row(4).tolist() == [False] * 5 + [True] * 2


def test_an_entry_that_another_run_makes_meanwhile_is_taken_and_old_ones_go(tmp_path, capfd):
    cache = tmp_path / "cache"

    def build(place):
        (cache / "new").mkdir()  # another run was faster
        (cache / "new/there").touch()
        place.mkdir()

    old = [entry(cache, name, name, Path.touch) for name in ("used", "unused")]
    for path in old:
        os.utime(path, (time.time() - UNUSED_SECONDS - 9,) * 2)
    entry(cache, "used", "used", Path.touch)
    assert (entry(cache, "new", "new", build) / "there").is_file()
    assert sorted(path.name for path in cache.iterdir()) == ["new", "used"]
    refused(DataError, lambda: entry(cache / "used/below", "x", "x", Path.touch), r"^data.cache_dir: ")


@dataclass(frozen=True)
class Deadly(PromptForm):
    """A form that kills the process at a certain row."""

    def pieces(self, row, template):
        if row["extra_info"]["level"] == 33:
            os._exit(3)
        return super().pieces(row, template)


@pytest.mark.slow
@pytest.mark.usefixtures("large")
def test_what_goes_wrong_in_a_process_arrives_with_its_row(files, tokenizer, tmp_path):
    paths = [files.parquet(rows_of(20), "a.parquet"), files.parquet(rows_of(40), "b.parquet")]
    options = {"workers": 2, "cache_dir": str(tmp_path / "cache")}
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ messages[0].content + ('' if '+33=' not in messages[0].content else 7) }}"
    error = refused(DataError, lambda: PromptDataset(paths, tokenizer, **options))
    assert "b.parquet row 33: TypeError" in str(error.got)
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"(?s)process died.*b.parquet row (3|2)0 on"):
        PromptDataset(paths, tokenizer, form=Deadly(), **options)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("tokens")]
