"""`tandem node` with the real Ray, on machines that are network namespaces."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.node_file import Head, HeadFile
from tests.cli.launching import launch, wait_for
from tests.support.netns import Node, cluster_network

PROGRAM = """
import json, sys, time
import ray

ray.init(address="auto", log_to_driver=False)
while len([node for node in ray.nodes() if node["Alive"]]) < 2:
    time.sleep(0.1)
nodes = {node["NodeManagerAddress"]: node["Resources"]["CPU"] for node in ray.nodes()}

@ray.remote(num_cpus=1)
def where():
    time.sleep(0.2)
    return ray.util.get_node_ip_address()

ran = sorted(set(ray.get([where.remote() for _ in range(3)])))
json.dump({"nodes": nodes, "ran": ran}, open(sys.argv[1], "w"))
sys.exit(7)
"""


class Cluster:
    """Launchers with the real Ray in two namespaces."""

    def __init__(self, machines: list[Node], folder: Path) -> None:
        self.machines = machines
        self.folder = folder
        self.file = HeadFile(folder / "head.json")

    def start(self, rank: int, *words: str, **environment: str) -> subprocess.Popen[Any]:
        options = ["--head-file", str(self.file.path), "--num-cpus", str(rank + 1), "--timeout", "60"]
        command = launch("ray", rank, *options, *words, MASTER_PORT="6379", **environment)
        with self.log(rank).open("w") as log:
            return self.machines[rank].start(command, stdout=log, stderr=subprocess.STDOUT)

    def log(self, rank: int) -> Path:
        return self.folder / f"log{rank}"

    def await_word(self, rank: int, word: str) -> None:
        wait_for(lambda: word in self.log(rank).read_text(), 60)

    def processes(self) -> list[int]:
        return [pid for machine in self.machines for pid in machine.processes()]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    with cluster_network(2) as machines:
        yield Cluster(machines, tmp_path)


@pytest.mark.slow
def test_two_machines_make_one_cluster(cluster, tmp_path):
    cluster.file.write(Head("10.213.0.1", 6379, "yesterday", "a"))  # the address of the next head
    (tmp_path / "program.py").write_text(PROGRAM)
    follower = cluster.start(1, SLURM_JOB_ID="today")
    time.sleep(1)
    words = ["--", sys.executable, str(tmp_path / "program.py"), str(tmp_path / "found.json")]
    leader = cluster.start(0, *words, SLURM_JOB_ID="today")
    assert leader.wait(timeout=60) == 7, cluster.log(0).read_text()
    assert follower.wait(timeout=15) == 0, cluster.log(1).read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["nodes"] == {"10.213.0.1": 1, "10.213.0.2": 2}
    assert found["ran"] == ["10.213.0.1", "10.213.0.2"]
    assert cluster.processes() == []
    assert not cluster.file.path.exists()
    assert not cluster.file.token_path.exists()


@pytest.mark.slow
def test_a_head_that_is_killed(cluster):
    leader = cluster.start(0)
    follower = cluster.start(1)
    cluster.await_word(1, "has joined")
    for pid in cluster.machines[0].processes():
        os.kill(pid, signal.SIGKILL)
    leader.wait(timeout=10)
    began = time.monotonic()
    assert follower.wait(timeout=40) == 1
    assert time.monotonic() - began < 30
    assert "stopped answering and did not end normally" in cluster.log(1).read_text()
    assert cluster.processes() == []


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_ray_along(cluster):
    leader = cluster.start(0)
    cluster.await_word(0, "the head is up")
    leader.kill()
    leader.wait(timeout=10)
    wait_for(lambda: cluster.processes() == [], 20)
