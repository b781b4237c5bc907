"""The process group's timeout of a collective, on two ranks, also started by torchrun."""

import pytest

from tests.support.ranks import run_ranks, torchrun

JOB = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
from tandem.models.parallel import init_distributed
Path(f"ready {os.environ['RANK']}").touch()
while len(list(Path().glob("ready *"))) < 2:  # the limit is that of the start too
    time.sleep(0.01)
init_distributed(torch.device("cpu"), timeout_s=3)
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1":
    time.sleep(9)
start = time.monotonic()
try:
    dist.all_reduce(torch.ones(1))
    print(f"rank {os.environ['RANK']} went on", flush=True)
except RuntimeError as error:
    print(f"rank {os.environ['RANK']} gave up after {time.monotonic() - start:.1f} s", flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", [run_ranks, torchrun])
def test_a_collective_ends_at_its_limit(tmp_path, monkeypatch, start):
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job.py"
    job.write_text(JOB)
    [line] = [line for line in start(job, timeout=100).splitlines() if line.startswith("rank 0")]
    assert line.startswith("rank 0 gave up after ")
    assert 2.5 <= float(line.split()[5]) < 8
