import os
import random
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from tandem.errors import ConfigError, DataError, WorkerFailure
from tandem.protocol import DataProto
from tandem.runtime import ResourcePool, WorkerGroup
from tests.support.faulty import Faulty
from tests.support.marks import slow_but

RayBackend = pytest.importorskip("tandem.runtime.ray_backend", exc_type=ImportError).RayBackend

ANSWER_S, CALL_S, LIMIT_S = 6.0, 8.0, 60.0


@pytest.fixture
def backend_of(ray_cluster, tmp_path):
    with ExitStack() as opened:

        def started(**options):
            backend = RayBackend(log_dir=tmp_path, **options)
            opened.callback(backend.shutdown)
            return backend

        yield started


@pytest.fixture
def backend(backend_of):
    return backend_of(answer_s=ANSWER_S, call_s=CALL_S, stop_s=5)


def alive(pid):
    with suppress(OSError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
    return False


def gone_within(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


SAYS = {
    "raise": "ValueError: the number is wrong",
    "sys.exit": "SystemExit: 3",
    "use all memory": "MemoryError",
}
SAYS |= dict.fromkeys(("exit", "die", "crash"), "its process died")
SAYS |= {"stop": "no answer for", "sleep": f"the limit is {CALL_S:g} s"}
QUICK = ("raise", "die")


@pytest.mark.parametrize("how", slow_but(QUICK, SAYS))
def test_one_report_in_bounded_time_and_nobody_left(backend, how):
    group = WorkerGroup(backend, Faulty, ResourcePool([2], "faulty"), role="policy")
    other = WorkerGroup(backend, Faulty, ResourcePool([1], "other"))
    assert group.total(1.5) == [3.0, 3.0]
    pids = group.pid() + other.pid()
    start = time.monotonic()
    future = group.fail(how, 1)
    with pytest.raises(WorkerFailure) as caught:
        future.get()
    assert time.monotonic() - start < LIMIT_S
    report = str(caught.value)
    rank = 0 if how == "sleep" else 1  # both run too long, and either could be waiting for the other
    assert report.startswith(f"policy rank {rank} of 2 failed in fail: ")
    assert SAYS[how] in report.splitlines()[0] and f"pid {pids[1]}" in report
    assert how == "crash" or f"about to {how}" in report  # the end of the process's log
    node = re.search(r"node ([0-9.]+)", report)[1]
    assert f"faulty rank {1 - rank} of 2 (node {node}, pid {pids[1 - rank]})" in report
    assert f"other rank 0 of 1 (node {node}, pid {pids[2]}): idle" in report
    assert caught.value.restartable
    assert how not in ("raise", "crash") or "faulty.py" in report  # the stack shows where it happened
    assert how != "sleep" or "time.sleep(1000)" in report  # the stack shows the line that runs
    if how == "raise":
        assert isinstance(caught.value.__cause__, ValueError) and "host.py" not in report
    if how == "crash":
        log = Path(report.partition("end of the log ")[2].partition(":")[0])
        assert "Fatal Python error: Segmentation fault" in log.read_text()
    backend.shutdown()
    assert gone_within(pids, 5)


def test_a_process_killed_while_idle_is_found(backend):
    group = WorkerGroup(backend, Faulty, ResourcePool([1], "idle"), role="quiet")
    waiting = WorkerGroup(backend, Faulty, ResourcePool([1], "waiting"))
    future = waiting.fail("sleep", 0)
    os.kill(group.pid()[0], 9)
    with pytest.raises(WorkerFailure, match="idle rank 0 of 1 failed: its process died"):
        future.get()


@pytest.mark.parametrize("pools", ["one pool", "two pools"])
def test_the_first_failure_is_reported_not_what_followed(backend, pools):
    pool = ResourcePool([1], "first")
    other = pool if pools == "one pool" else ResourcePool([1], "second")
    first = WorkerGroup(backend, Faulty, pool, role="source")
    second = WorkerGroup(backend, Faulty, other, role="sink")
    later = second.double(second.double(first.double(DataProto({"x": torch.tensor([1.0, -1.0])}))))
    with pytest.raises(WorkerFailure) as caught:
        later.get()
    assert str(caught.value).startswith("source rank 0 of 1 failed in double: ")
    assert isinstance(caught.value.__cause__, DataError) and caught.value.__cause__.field == "x"
    assert "expression.py" not in str(caught.value)
    assert not caught.value.restartable  # the same input would fail again
    assert first.double(DataProto({"x": torch.tensor([2.0])})).get().dense("x").tolist() == [4.0]


def test_a_value_belongs_to_whoever_got_it(backend):
    group = WorkerGroup(backend, Faulty, ResourcePool([2], "values"))
    future = group.table()
    for batch in future.get():
        batch.dense("x").zero_()
    assert [batch.dense("x").tolist() for batch in future.get()] == [[1.0] * 1000] * 2
    shared = DataProto({"x": torch.ones(100_000)})
    assert group.spoil(shared) == [100_000.0, 100_000.0]  # each rank has its own copy
    assert group.spoil([shared, shared]) == [200_000.0, 200_000.0]
    assert bool((shared.dense("x") == 1).all())


@pytest.mark.slow
def test_pools_come_and_go_while_they_are_watched(backend_of):
    backend = backend_of(answer_s=0.6, stop_s=5)
    for number in range(4):
        pool = ResourcePool([2], f"pool_{number}")
        group = WorkerGroup(backend, Faulty, pool)
        pids = group.pid()
        group.shutdown()
        backend.release([pool.name])
        assert gone_within(pids, 5)
        backend.take_traffic()


@pytest.mark.slow
def test_each_pool_listens_on_a_port_of_its_own(backend_of):
    port = _free_port()
    backend = backend_of(master_port=port)
    helper = WorkerGroup(backend, Faulty, ResourcePool([1], "helper"))
    a, b = (WorkerGroup(backend, Faulty, ResourcePool([2], name)) for name in "ab")
    assert a.total(1.0) == b.total(1.0) == [2.0, 2.0]
    ports = [group.environment("MASTER_PORT")[0] for group in (helper, a, b)]
    assert ports == [None, str(port), str(port + 1)]
    with socket.create_server(("", port + 2)), pytest.raises(WorkerFailure) as caught:
        WorkerGroup(backend, Faulty, ResourcePool([2], "c"))
    assert isinstance(caught.value.__cause__, ConfigError)
    assert caught.value.__cause__.field == "trainer.cluster.master_port"
    assert not caught.value.restartable


def _free_port():
    """Return the first of three consecutive free ports, below the range that systems assign automatically."""
    while True:
        port = random.randrange(10_000, 30_000)
        with suppress(OSError), ExitStack() as held:
            for number in range(port, port + 3):
                held.enter_context(socket.create_server(("", number)))
            return port


def test_a_watch_that_fails_says_so(backend_of):
    def closed(_):
        raise BrokenPipeError("nobody listens")

    group = WorkerGroup(backend_of(answer_s=3, say=closed), Faulty, ResourcePool([1], "speaks"))
    group.speak("hello")
    with pytest.raises(WorkerFailure, match=r"watch .* failed: nobody listens"):
        group.fail("sleep", 0).get()


def test_children_of_a_killed_worker_end_too(backend):
    group = WorkerGroup(backend, Faulty, ResourcePool([1], "parent"))
    (child,), (pid,) = group.spawn(), group.pid()
    os.kill(pid, 9)
    assert gone_within([child], 10)


def test_what_cannot_be_placed_is_refused_before_anything_starts(backend_of, tmp_path):
    for backend, pools, facts in (
        (backend_of(), ([1, 1], [1]), ("pool 0: 1 + 1 process", "2 node", "trainer.cluster.address=auto")),
        (backend_of(device="cuda"), ([1],), ("1 GPU(s) on 1 node",)),
    ):
        with pytest.raises(ConfigError) as caught:
            backend.reserve([ResourcePool(counts, f"pool {i}") for i, counts in enumerate(pools)])
        assert all(fact in str(caught.value) for fact in facts)
    assert not list(tmp_path.glob("*.log"))


def test_processes_that_do_not_come_up_in_time(backend_of):
    with pytest.raises(WorkerFailure, match=r"trainer.timeouts.start=0.01 s\n(.|\n)*0 of 1"):
        backend_of(start_s=0.01).reserve([ResourcePool([1], "slow")])


def test_what_a_machine_says_itself_counts_before_what_was_found_there(monkeypatch):
    actor = pytest.importorskip("tandem.runtime.ray_backend.actor")
    monkeypatch.setattr(actor, "set_threads", lambda count: None)
    own = {"NCCL_SOCKET_IFNAME": "ib0", "RANK": "7"}
    monkeypatch.setattr(os, "environ", own)
    actor._Host.join(None, {"RANK": "1"}, {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}, 1)
    assert own == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0", "RANK": "1"}


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
