import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tandem.observability.run import read_metrics
from tests.e2e.ray_runs import RayRun, command
from tests.e2e.shop import SOURCES
from tests.support.netns import Node, cluster_network

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 150


def node(machine: Node, rank: int, head_file: Path, *words: str) -> subprocess.Popen[str]:
    own = {"RANK": str(rank), "MASTER_PORT": "6379", "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "tandem", "node", "--head-file", str(head_file), "--num-cpus", "4"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options = {"cwd": head_file.parent, "env": os.environ | own, "start_new_session": True, **streams}
    return machine.start([*start, *words], **options)


def over(nodes: int) -> str:
    cluster = "trainer.cluster.address=auto trainer.backend=ray"
    return f"Q={{}} P={{}} trainer.nnodes={nodes} trainer.n_gpus_per_node=1 {cluster}"


def test_a_node_goes_and_the_run_goes_on_on_the_other(shop):
    folder, steps = shop.folder / "nodes", 6
    head_file = shop.folder / "head.json"
    train = [sys.executable, "-m", "tandem", "train"]
    with cluster_network(2) as (first, second):
        words = command(shop, "nodes", steps, over(2))
        head = node(first, 0, head_file, "--", *train, *words)
        follower = node(second, 1, head_file)
        run = RayRun(head, folder, controller_is_leader=False)
        run.await_phase("update_actor", after_step=2)
        places = run.places
        pool = {address for name, (address, _) in places.items() if name.startswith("global_pool")}
        assert pool == {first.address, second.address}
        lost = [name for name, (address, _) in places.items() if address == second.address]
        start = time.monotonic()
        for pid in second.processes():
            with suppress(ProcessLookupError):  # some processes end on their own
                os.kill(pid, signal.SIGKILL)
        printed = run.end(LIMIT_S)
        assert time.monotonic() - start < LIMIT_S
        assert head.returncode == 1, printed
        assert f"{second.address}" in printed.split("other processes:")[0], printed
        assert lost, places
        assert run.survivors() == []
        assert follower.wait(timeout=10) != 0
        done = max(row["step"] for row in read_metrics(folder / "metrics.jsonl"))
        assert 2 <= done < steps

        alone = node(first, 0, head_file, "--", *train, *command(shop, "nodes", steps, over(1)))
        printed, _ = alone.communicate(timeout=240)
        assert alone.returncode == 0, printed
        assert "resumed from" in printed
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
