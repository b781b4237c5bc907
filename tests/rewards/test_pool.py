import gc
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tandem.config.rewards import RewardConfig
from tandem.errors import RewardError
from tandem.rewards import Item, Pool
from tandem.rewards.base import WeightedSum
from tests.support.refusing import refused

SOURCE = """
import asyncio, ctypes, os, signal, tempfile, time

kept = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kind, value = solution_str.split()
    if kind == "hang": time.sleep(600)
    if kind == "exit": os._exit(3)
    if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if kind == "segfault": ctypes.string_at(0)
    if kind == "leak": kept.append(bytearray(os.urandom(1)) * (64 << 20))
    if kind == "print": print("printed", value)
    return {"score": float(value), "pid": os.getpid()}

def column(response, **columns):
    return len(response)

def format(prompt, response):
    if response == "hang": time.sleep(600)
    return 1.0 if response.startswith("ok") else None

def group(prompt, responses, **columns):
    return [float(len(responses)) + 0.1 * place for place in range(len(responses))]

met = vars(asyncio).setdefault("met", {name: asyncio.Event() for name in ("first", "second")})  # of all loads

async def meet(mine, other, text):
    met[mine].set()
    await asyncio.wait_for(met[other].wait(), 5)
    if mine in text: raise ValueError(mine)
    return 1.0

async def first(prompt, response):
    return await meet("first", "second", response)

async def second(prompt, response):
    return await meet("second", "first", response)

def folder(prompt, response):
    return {"score": 0, "why": tempfile.mkdtemp()}

async def waiting(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.5)
    return float(solution_str.split()[1])
"""


def items_of(*texts):
    return [Item("any", text, None, index=row) for row, text in enumerate(texts)]


def asked(*texts, uids="   "):
    pairs = zip(texts, uids, strict=False)
    return [Item("any", text, None, columns={"prompt": "p"}, uid=uid) for text, uid in pairs]


def told(scored):
    return [(each.score, each.failed) for each in scored]


@pytest.fixture
def reward(own):
    return lambda name="compute_score": own(SOURCE, name)


def test_each_failure_costs_its_own_sample_alone(reward, tmp_path, pool, capfd):
    bad = {3: "hang", 4: "segfault", 9: "kill", 15: "exit"}
    texts = [f"{bad.get(row, 'ok')} {row + 1}" for row in range(24)]
    texts[20] = "print 21"
    made = pool(reward(), num_workers=2, timeout=1.0, on_error="zero")
    scored = made.score(items_of(*texts))
    assert told(scored) == [(0.0, True) if row in bad else (row + 1.0, False) for row in range(24)]
    assert (made.counts["failed"], made.counts["timeouts"], made.counts["died"]) == (4, 1, 2)
    assert sorted(made.failures) == sorted(bad)
    assert "1 s" in made.failures[3].message and "reward.timeout" in made.failures[3].remedy
    assert "sample 9, row 9 of the data" in made.failures[9].field
    assert "printed 21" in (tmp_path / "reward.log").read_text()
    assert "printed" not in "".join(capfd.readouterr())
    pids = {int(s.extra["pid"]) for s in scored if s.extra}
    assert os.getpid() not in pids
    made.close()
    assert not any(map(psutil.pid_exists, pids))


def test_a_leak_replaces_its_process_but_not_what_the_first_call_keeps(reward, pool):
    made = pool(reward(), num_workers=1, max_growth_mb=48)
    scored = made.score(items_of("leak 0", "leak 1", "ok 2", "ok 3"))
    assert [s.score for s in scored] == [0.0, 1.0, 2.0, 3.0]
    first, leaky, fresh, same = (s.extra["pid"] for s in scored)
    assert first == leaky != fresh == same
    assert made.counts == {"recycled": 1}


def test_the_limit_is_that_of_each_call_however_many_a_process_is_sent(own, pool):
    slow = own("import time\ndef compute_score(**given):\n    time.sleep(0.25)\n    return 1.0\n")
    made = pool(slow, num_workers=1, timeout=1.5)
    assert [s.score for s in made.score(items_of(*["any"] * 8))] == [1.0] * 8 and not made.counts


def test_a_failure_raises_after_its_retries_and_the_next_batch_is_scored(reward, pool):
    made = pool(reward(), num_workers=1, retries=2)
    refused(RewardError, lambda: made.score(items_of("ok 1", "kill 2")), "sample 1, row 1 of the data")
    assert (made.counts["died"], made.counts["failed"]) == (3, 0)
    assert told(made.score(items_of("ok 5"))) == [(5.0, False)]


@pytest.mark.parametrize("wait", [0.0, 0.001, 0.05, 1.0])
def test_a_pool_is_closed_while_another_thread_scores(reward, pool, wait):
    made = pool(reward(), num_workers=2, timeout=60.0)
    with ThreadPoolExecutor(1) as thread:
        scoring = thread.submit(made.score, items_of("hang 1", "hang 2"))
        time.sleep(wait)
        made.close()
        assert type(scoring.exception(10)) is RewardError
    assert not made._children
    refused(RewardError, lambda: made.score(items_of("ok 1")), "closed")


def test_a_process_that_died_between_batches_costs_no_score(reward, pool):
    made = pool(reward(), num_workers=1)
    (scored,) = made.score(items_of("ok 1"))
    ended = psutil.Process(int(scored.extra["pid"]))
    ended.kill()
    ended.wait(10)
    time.sleep(0.2)  # until the server has reported that it made the process
    assert told(made.score(items_of("ok 2", "ok 3"))) == [(2.0, False), (3.0, False)]
    assert made.counts == {"died": 1}


def test_a_failure_is_handled_in_this_process_too(reward, pool):
    made = pool(reward(), num_workers=0, on_error="zero")
    scored = made.score(items_of("ok 1", "exit 2", "ok three", "ok 4"))
    assert told(scored) == [(1, False), (0, True), (0, True), (4, False)]
    assert scored[0].extra["pid"] == os.getpid()
    made = pool(reward("format"), num_workers=1, on_error="drop")
    assert told(made.score(asked("ok", "no"))) == [(1.0, False), (0.0, True)]  # nothing to say is a failure
    assert made.counts == {"failed": 1}


@pytest.mark.slow
def test_asynchronous_calls_wait_side_by_side_and_a_failed_one_fails_alone(reward, pool):
    made = pool(reward("waiting"), num_workers=1, on_error="zero")
    made.score(items_of("ok 0"))
    began = time.monotonic()
    assert [s.score for s in made.score(items_of(*[f"ok {n}" for n in range(16)]))] == list(range(16))
    assert time.monotonic() - began < 4
    assert told(made.score(items_of("ok 1", "bad", "ok 3"))) == [(1, False), (0, True), (3, False)]


def test_functions_of_a_sum_are_called_apart(reward, pool):
    terms = [("format", 1.0), ("waiting", 0.5), ("group", 10.0)]
    total = WeightedSum(tuple((name, reward(name), weight) for name, weight in terms))
    made = pool(total, num_workers=2, timeout=1.5, on_error="zero")
    scored = made.score(asked("ok 4", "no 6", "ok 8", uids="aba"))
    assert [s.score for s in scored] == pytest.approx([1 + 2 + 20, 3 + 10, 1 + 4 + 21])
    assert "format" not in scored[1].extra
    assert told(made.score(asked("hang", "ok 2"))) == [(20.0, True), (1 + 1 + 21.0, False)]


def test_asynchronous_functions_of_a_sum_wait_side_by_side(reward, pool):
    total = WeightedSum((("first", reward("first"), 1), ("second", reward("second"), 2)))
    made = pool(total, num_workers=1, timeout=20, on_error="zero", retries=1)
    assert told(made.score(asked("a", "first", "b"))) == [(3, False), (2, True), (3, False)]
    assert made.counts == {"failed": 1, "retried": 1}


def test_temporary_files_go_with_the_pool(reward):
    pool = Pool(reward("folder"), RewardConfig(num_workers=1))
    (scored,) = pool.score(asked(""))
    assert Path(scored.why).is_dir()
    pool.close()
    del pool
    gc.collect()
    assert not Path(scored.why).parent.exists()


@pytest.mark.slow
def test_a_silent_function_is_spoken_of_once(reward, pool, monkeypatch):
    monkeypatch.setattr("tandem.rewards.pool.SLOW_SECONDS", 0.5)
    said = []
    made = pool(reward(), said.append, num_workers=1, timeout=3, on_error="zero")
    made.score(items_of("ok 1"))
    said.clear()
    made.score(items_of("hang 1"))
    (line,) = said
    assert "row 0" in line and "3 s (reward.timeout)" in line


def test_no_process_outlives_a_killed_parent(tmp_path):
    (tmp_path / "own.py").write_text(SOURCE)
    program = f"""
from pathlib import Path
from tandem.config.rewards import RewardConfig
from tandem.rewards import Item, Pool, load_custom
folder = Path({str(tmp_path)!r})
pool = Pool(load_custom(str(folder / "own.py")), RewardConfig(num_workers=2), folder / "reward.log")
pool.score([Item("any", "ok 1", None)] * 4)
print("started", flush=True)
pool.score([Item("any", "hang 1", None)] * 4)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "started\n"
        time.sleep(0.5)
        below = psutil.Process(parent.pid).children(recursive=True)
        assert len(below) >= 3  # two scoring processes, and the server that forked them
        parent.kill()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
