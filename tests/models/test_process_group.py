"""The process group's limit on a collective, on two ranks started by torchrun."""

from tests.support.ranks import torchrun

JOB = """
import os, time
import torch, torch.distributed as dist
from tandem.models.parallel import init_distributed
from tests.support.ranks import torchrun
init_distributed(torch.device("cpu"), timeout_s=2)
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1":
    time.sleep(8)
start = time.monotonic()
try:
    dist.all_reduce(torch.ones(1))
    print(f"rank {os.environ['RANK']} went on", flush=True)
except RuntimeError as error:
    print(f"rank {os.environ['RANK']} gave up after {time.monotonic() - start:.1f} s", flush=True)
os._exit(0)
"""


def test_a_collective_ends_at_its_limit(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    [line] = [line for line in torchrun(job, timeout=100).splitlines() if line.startswith("rank 0")]
    assert line.startswith("rank 0 gave up after ")
    assert 1.5 <= float(line.split()[5]) < 7
