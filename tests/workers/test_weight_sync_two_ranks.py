import re
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.workers import roles
from tests.workers.streamed import FAULTS, NAME

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = roles.make_folder(tmp_path_factory.mktemp("models"))
    run_ranks(Path(__file__).with_name("sync_job.py"), folder, folder / "record.pt")
    return torch.load(folder / "record.pt", weights_only=False)


def test_the_digest_of_the_shards_is_that_of_the_whole_on_every_rank(record):
    assert record["digests"] == record["half digests"] == [True, True]


def test_a_stale_gather_is_found_on_the_rank_that_has_it(record):
    first, second = record["stale gather"]
    assert first == "nothing"
    assert re.match(f"{NAME}: {NAME} [0-9a-f]+ is still that of version 0", second)
    assert record["shared"] == ["nothing", "nothing"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_stream_is_found_on_every_rank(record, fault):
    for found in record["streamed"][fault]:
        assert found.startswith(f"{NAME}: {NAME} "), found
    assert record["streamed"]["none"] == ["True", "True"]


def test_buckets_arrive_in_the_shards_and_a_missing_one_is_found(record):
    apart = record["apart"]
    count = int(apart["count"][0])
    assert count > 3
    assert apart["left out"] == [f"None: bucket 2 of {count}, version 1"] * 2
    assert apart["whole"] == ["nothing", "nothing"]
    assert apart["same"] == ["True", "True"]
