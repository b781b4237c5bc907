import os
import subprocess
import sys

import pytest

from tandem.errors import WorkerFailure

ray = pytest.importorskip("ray")
cluster = pytest.importorskip("tandem.runtime.ray_backend.cluster")

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_the_controllers_breakpoint_is_the_users():
    """Ray would set its own debugger, also in every process that this process starts."""
    assert "PYTHONBREAKPOINT" not in os.environ


def test_a_ray_that_does_not_start_in_time_is_a_failure_that_a_restart_may_mend(monkeypatch):
    def init(**_):
        raise Exception("The current node timed out during startup.")

    ended = []
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(WorkerFailure, match=r"timed out during startup(.|\n)*max_restarts") as raised:
        cluster._start(None, None, {})
    assert raised.value.restartable
    assert ended == [True]


STARTS = """
import os, ray
from tandem.errors import ConfigError
from tandem.runtime.ray_backend.cluster import connect

try:
    connect(None, ray_init={"num_cpu": 3})
except ConfigError as error:
    print("refused", "num_cpu" in str(error), error.field)
connect(None, ray_init={"num_cpus": 3, "runtime_env": {"env_vars": {"A_VARIABLE": "5"}}})
seen = ray.remote(lambda: os.environ["A_VARIABLE"])
print(ray.cluster_resources()["CPU"], ray.get(seen.remote(), timeout=60))
"""


@pytest.mark.slow
def test_further_arguments_reach_ray():
    words = [sys.executable, "-c", STARTS]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["refused True trainer.cluster.ray_init", "3.0 5"]
