"""`tandem node` with the real Ray, and examples/cluster, on machines that are network namespaces."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli.node_file import Head, HeadFile
from tandem.config.load import load_train_config
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


FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
CRD_REQUIRES = {  # required by KubeRay's ray.io/v1
    "spec.rayClusterSpec": {"headGroupSpec"},
    "headGroupSpec": {"template"},
    "workerGroupSpecs": {"groupName", "maxReplicas", "minReplicas", "template"},
}
# Like srun: run the command on every node at the same time, and fail as soon as one fails.
SRUN = """
import os, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--kill")]
tasks = [
    subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{name}", *words], env={**os.environ, "SLURM_PROCID": str(rank)}
    )
    for rank, name in enumerate(os.environ["NODES"].split())
]
sys.exit(max(task.wait(timeout=90) for task in tasks))
"""
# A stand-in for `tandem`: `node` is the real one, `train` reports the cluster that it finds.
TANDEM = """
import json, sys, time
if sys.argv[1] == "node":
    from tandem.cli.main import main
    sys.exit(main())
import ray
ray.init(address="auto", log_to_driver=False)
while len([node for node in ray.nodes() if node["Alive"]]) < 2:
    time.sleep(0.1)
found = {"words": sys.argv[1:], "nodes": sorted(node["NodeManagerAddress"] for node in ray.nodes())}
json.dump(found, open("found.json", "w"))
"""


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)


@pytest.mark.slow
def test_the_slurm_script_trains_on_all_nodes(tmp_path):
    pytest.importorskip("ray")
    for name, text in (("srun", SRUN), ("tandem", TANDEM)):
        _program(tmp_path / name, text)
    with cluster_network(2) as machines:
        own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
        own |= {"PYTHONPATH": str(FOLDER.parents[1]), "NODES": " ".join(machine.name for machine in machines)}
        own |= {"SLURM_JOB_ID": "1234", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
        command = ["bash", str(FOLDER / "slurm.sbatch"), "config.yaml", "trainer.seed=3"]
        shown = {"capture_output": True, "text": True}
        env = {**os.environ, **own}
        done = subprocess.run(command, cwd=tmp_path, env=env, timeout=120, check=False, **shown)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [pid for machine in machines for pid in machine.processes()] == []
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["nodes"] == ["10.213.0.1", "10.213.0.2"]
    assert found["words"] == [
        *("train", "config.yaml", "trainer.seed=3", "trainer.nnodes=2", "trainer.n_gpus_per_node=8"),
        *("trainer.cluster.address=auto", "trainer.timeouts.resources=360"),
    ]
    assert "the head is up at 10.213.0.1:21234" in done.stdout
    assert list(tmp_path.glob("ray_head*")) == []


def _groups() -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text(encoding="utf-8"))
    cluster = job["spec"]["rayClusterSpec"]
    return job, cluster["headGroupSpec"], cluster["workerGroupSpecs"]


def test_the_kubernetes_file_has_what_its_operator_requires():
    job, head, workers = _groups()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    pins = (FOLDER.parents[1] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={job['spec']['rayClusterSpec']['rayVersion']}" in pins
    assert CRD_REQUIRES["spec.rayClusterSpec"] <= job["spec"]["rayClusterSpec"].keys()
    assert CRD_REQUIRES["headGroupSpec"] <= head.keys()
    for group in workers:
        assert CRD_REQUIRES["workerGroupSpecs"] <= group.keys()
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    for group in (head, *workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.fixture
def needed(tmp_path: Path) -> list[str]:
    """Return the keys that every config must set."""
    data, model = tmp_path / "train.parquet", tmp_path / "model"
    data.touch()
    model.mkdir()
    (model / "config.json").write_text("{}")
    return [f"data.train_files={data}", f"actor_rollout_ref.model.path={model}"]


def test_the_kubernetes_file_asks_for_the_nodes_it_makes(needed):
    job, _, (workers,) = _groups()
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["tandem", "train", "/data/config.yaml"]
    trainer = load_train_config(None, words[3:] + needed).config.trainer
    assert trainer.nnodes == workers["replicas"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert trainer.n_gpus_per_node == int(limits["nvidia.com/gpu"])
    assert trainer.cluster.address == "auto"


def test_every_key_that_the_readme_names_exists(needed):
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    config = load_train_config(None, needed).config
    names = set(re.findall(r"trainer(?:\.\w+)+", text))
    assert len(names) >= 7
    for name in names:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
