import os
import re
import threading
import time

import psutil
import pytest

from tandem import lifetime
from tandem.errors import ConfigError, RewardError
from tandem.rewards import Item, forkserver
from tandem.rewards.combination import load_combine
from tests.support.marks import slow_but
from tests.support.refusing import refused

pytestmark = pytest.mark.timeout(60)
TIMEOUT = 2.0
FIELD = "sample 1, row 1 of the data, data_source 'any'"
GIVEN = "data_source, solution_str, ground_truth, extra_info=None"
DAEMON = """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(1, 32):
                try: signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError): pass
            open(FOLDER + "/daemon", "w").write(str(os.getpid()))
            os.closerange(0, 256)
            time.sleep(600)
        os._exit(0)
    while not os.path.exists(FOLDER + "/daemon") or not open(FOLDER + "/daemon").read(): time.sleep(0.01)
"""
KINDS = {  # the body of a function, and its score; None: the function fails
    "forks and returns twice": ("os.fork(); return 1.0", 1.0),
    "forks, returns twice, and the copy is late": ("if not os.fork(): time.sleep(0.5)\n    return 1.0", 1.0),
    "copies that fork in C": ("ctypes.CDLL(None).fork(); return 1.0", 1.0),
    "writes to all descriptors": ("for n in range(3, 99): write(n, b'x' * 999)\n    return 1.0", None),
    "half an answer": ("write(3, b'x' * 7); time.sleep(600)", None),
    "a huge length": ("write(3, b'\\xff' * 40); return 1.0", None),
    "endless writing": ("while True: os.write(3, bytes(9999))", None),
    "closes all descriptors": ("os.closerange(0, 256); return 1.0", None),
    "reads its questions": ("os.read(3, 99); return 1.0", None),
    "kills its parent": ("os.kill(os.getppid(), 9); time.sleep(600)", None),
    "stops its parent": ("os.kill(os.getppid(), signal.SIGSTOP); time.sleep(600)", None),
    "kills its group": ("os.killpg(0, 9)", None),
    "stops": ("os.kill(os.getpid(), signal.SIGSTOP)", None),
    "leaves a daemon": (DAEMON + "    return 1.0", 1.0),
    "leaves a daemon and dies": (DAEMON + "    os.kill(os.getpid(), 9)", None),
    "exits": ("os._exit(0)", None),
    "exits in a thread": ("threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(600)", None),
    "sys.exit in a thread": ("threading.Thread(target=sys.exit).start(); return 1.0", 1.0),
    "threads that stay": ("threading.Thread(target=time.sleep, args=(600,)).start(); return 1.0", 1.0),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", None),
    "GeneratorExit": ("raise GeneratorExit", None),
    "BaseException": ("raise type('Own', (BaseException,), {})()", None),
    "an exception without a text": ("raise type('Own', (ValueError,), {'__str__': lambda s: 1 / 0})", None),
    "an exception of a long text": ("raise ValueError('x' * 10**8)", None),
    "a huge number": ("return 10**5000", None),
    "a huge number as name": ("return {'score': 1.0, 10**5000: 1.0}", None),
    "a generator": ("return (x for x in [1.0])", None),
    "a coroutine": ("return asyncio.sleep(1)", None),
    "many keys": ("return {'score': 1.0} | {str(n): n for n in range(200_000)}", None),
    "keys with escapes": ("return {'score': 1.0, '\\x1b[2J': 1.0}", None),
    "keys of other kinds": ("return {'score': 1.0, 3: 4.0, (1, 2): None}", 1.0),
    "a dict in itself": ("d = {}; d['score'] = d; return d", None),
    "a deep dict": ("d = {}\n    for _ in range(9999): d = {'score': d}\n    return d", None),
    "a long answer": ("return {'score': 1.0, 'pred': 'x' * 10**8}", 1.0),
    "a long text": ("return 'x' * 10**9", None),
    "__float__ raises": ("return Odd()", None),
    "__float__ never ends": ("return Odd(600)", None),
    "deep recursion": ("f = lambda: f(); f()", None),
    "a fault": ("ctypes.string_at(0)", None),
    "no memory": ("resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); bytearray(2**34)", None),
    "blocks all signals": ("signal.pthread_sigmask(0, range(1, 65)); time.sleep(600)", None),
    "removes its folder": ("shutil.rmtree(tempfile.gettempdir()); return 1.0", 1.0),
    "changes its surroundings": ("os.chdir('/'); os.umask(0o777); os.environ.clear(); return 1.0", 1.0),
    "closes its streams": ("sys.stdout.close(); sys.stderr = None; os.close(1); return 1.0", 1.0),
}
SLOW = {"stops its parent", "half an answer", "reads its questions", "stops", "__float__ never ends"}
HEAD = """
import asyncio, ctypes, numbers, os, resource, shutil, signal, sys, tempfile, threading, time
FOLDER = {folder!r}

class Odd(float):
    def __new__(cls, wait=0):
        made = float.__new__(cls, 1.0)
        made.wait = wait
        return made
    def __float__(self):
        time.sleep(self.wait)
        raise ValueError("no number")

def write(number, data):
    try: os.write(number, data)
    except OSError: pass

def attack():
    {body}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "attack":
        return attack()
    return {{"score": float(solution_str), "folder": len(tempfile.mkdtemp())}}
"""


def texts(*words):
    return [Item("any", word, None, index=row) for row, word in enumerate(words)]


@pytest.fixture
def hostile(tmp_path, own):
    return lambda body: own(HEAD.format(folder=str(tmp_path), body=body))


def scores(pool, *words):
    return [each.score for each in pool.score(texts(*words))]


def servers():
    return [each for each in psutil.Process().children() if "rewards.forkserver" in "".join(each.cmdline())]


@pytest.mark.parametrize("kind", slow_but(KINDS.keys() - SLOW, KINDS))
def test_what_a_function_does_costs_its_own_score_alone(kind, tmp_path, hostile, pool):
    body, score = KINDS[kind]
    made = pool(hostile(body), num_workers=1, timeout=TIMEOUT, on_error="zero")
    began = time.monotonic()
    scored = made.score(texts("2", "attack", "3", "4"))
    again = scores(made, "5", "6")
    assert time.monotonic() - began < 30
    assert [s.score for s in scored] == [2.0, score or 0.0, 3.0, 4.0] and again == [5.0, 6.0]
    assert [s.failed for s in scored] == [False, score is None, False, False]
    assert all(error.field == FIELD for error in made.failures.values())
    made.close()
    (server,) = servers()
    assert not psutil.wait_procs(server.children(recursive=True), timeout=5)[1]
    daemon = tmp_path / "daemon"
    pid = int(daemon.read_text()) if daemon.exists() else None
    dead = pid is None or not psutil.pid_exists(pid)
    assert dead or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_answer_names_its_failure_and_ends_the_run_where_that_is_asked_for(hostile, pool):
    made = pool(hostile("write(3, bytes(99)); return 1.0"), num_workers=2)
    error = refused(RewardError, lambda: made.score(texts("1", "attack", "3")), "compute_score")
    assert error.field == FIELD


def test_what_a_thread_writes_between_batches_costs_no_score(hostile, pool):
    made = pool(hostile("threading.Timer(0.5, write, (3, b'x' * 50)).start(); return 1.0"), num_workers=1)
    assert scores(made, "attack") == [1.0]
    time.sleep(1.5)
    assert scores(made, "2") == [2.0] and made.counts == {"died": 1}


def test_what_is_printed_has_a_limit(tmp_path, hostile, pool):
    made = pool(hostile("for _ in range(100): os.write(1, b'x' * 10**6)\n    return 1.0"), num_workers=1)
    assert scores(made, "attack", "2") == [1.0, 2.0]
    made.close()
    log = (tmp_path / "reward.log").read_text()
    assert forkserver.CALL_BYTES <= len(log) < forkserver.CALL_BYTES + 1000
    assert log.count("x") == forkserver.CALL_BYTES
    assert re.findall(r"\d{4,}", log) == [str(10**8 - forkserver.CALL_BYTES)]


def test_a_log_that_is_full_takes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(forkserver, "LOG_BYTES", 1000)
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for call in range(20):
        printed = forkserver.Printed(log, bytearray(call.to_bytes(8, "big")))
        printed.take(b"x" * 300)
        printed.tell()
    os.close(log)
    text = (tmp_path / "log").read_text()
    assert text.count("x") == 1000 and len(text.encode()) < 1200


def test_a_function_that_changes_what_it_is_given_changes_it_for_no_other_call(own, pool):
    reward = own(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    ground_truth.append(1); extra_info['a'].append(1)\n"
        "    return len(ground_truth) + len(extra_info['a'])\n"
    )
    truth = []
    for workers in (0, 1):
        scored = pool(reward, num_workers=workers).score([Item("any", "", truth, {"a": truth})] * 40)
        assert {s.score for s in scored} == {4.0}
    assert truth == []


@pytest.mark.parametrize("act", slow_but({"await asyncio.sleep(600)", "os.fork()"}, [
    "asyncio.current_task().cancel(); await asyncio.sleep(1)", "await asyncio.sleep(600)", "time.sleep(600)",
    "await asyncio.gather(asyncio.sleep(0), fails())", "await asyncio.create_task(exits())", "os.fork()",
    "raise KeyboardInterrupt", "asyncio.get_running_loop().stop(); await asyncio.sleep(600)",
]))  # fmt: skip
def test_an_asynchronous_function_costs_its_own_score_alone(act, own, pool):
    reward = own(
        "import asyncio, os, sys, time\nasync def fails(): raise ValueError\nasync def exits(): sys.exit(3)\n"
        f"async def compute_score({GIVEN}):\n    if solution_str == 'attack': {act}\n    return 1.0\n"
    )
    made = pool(reward, num_workers=1, timeout=TIMEOUT, on_error="drop")
    assert [s.failed for s in made.score(texts("a", "attack", "b"))] == [False, act != "os.fork()", False]
    assert [s.failed for s in made.score(texts("a"))] == [False]


CLIENT = """
import asyncio
import httpx2

async def refused(GIVEN):
    async with httpx2.AsyncClient() as client:
        (await client.get("http://127.0.0.1:9/")).raise_for_status()

async def status(GIVEN):
    request = httpx2.Request("GET", "http://127.0.0.1:9/")
    httpx2.Response(500, request=request).raise_for_status()

def late(GIVEN): raise TimeoutError("no answer")
def deep(GIVEN):
    import json
    json.loads("{")
def wrapped(GIVEN):
    try: raise ConnectionResetError
    except OSError as error: raise ValueError("no score") from error
def nested(GIVEN): return own_helper(solution_str)
def own_helper(text):
    raise LookupError(text)
"""
LINES = {"refused": 7, "status": 11, "late": 13, "deep": 16, "wrapped": 19, "nested": 22}


@pytest.mark.parametrize("name", LINES)
def test_an_error_is_at_the_users_own_line_and_one_of_the_network_can_be_tried_again(name, own, pool):
    with pytest.raises(RewardError) as caught:
        pool(own(CLIENT.replace("GIVEN", GIVEN), name), num_workers=1).score(texts("a"))
    assert f"(own.py, line {LINES[name]})" in caught.value.message
    remedy = str(caught.value.remedy)
    assert ("reward.retries" in remedy and "reward.on_error" in remedy) == (name not in ("deep", "nested"))


@pytest.mark.parametrize(("body", "said"), [
    ("import time; time.sleep(600)", "TimeoutError"), ("import sys; sys.exit(3)", "status 3"),
    ("import time\ntry: time.sleep(600)\nexcept Exception: pass", "TimeoutError"), ("def", "SyntaxError"),
    ("import os; os._exit(3)", "status 3"), ("raise type('Own', (BaseException,), {})('no')", "Own"),
])  # fmt: skip
def test_a_file_that_cannot_be_loaded_is_named_in_time(body, said, own, monkeypatch):
    monkeypatch.setattr("tandem.rewards.calling.LOAD_SECONDS", 0.5)
    with pytest.raises(RewardError) as caught:
        own(body + "\ndef compute_score(data_source, solution_str, ground_truth): return 1.0\n", timeout=0.5)
    assert caught.value.field == "custom_reward_function.path" and said in caught.value.message
    assert ("reward.timeout" in str(caught.value.remedy)) == ("sleep" in body)


def test_a_file_that_combines_has_a_limit_too(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.rewards.calling.LOAD_SECONDS", 0.5)
    (tmp_path / "own.py").write_text("import time; time.sleep(600)")
    named = f"{tmp_path / 'own.py'}:function"
    assert refused(ConfigError, lambda: load_combine(named, 0.5)).field == named


@pytest.mark.parametrize("body", ["time.sleep(600)", "os.kill(os.getpid(), 9)", "1 / 0", "os.fork()"])
def test_a_file_that_fails_in_the_processes_alone_is_named_in_time(body, own, pool, monkeypatch):
    monkeypatch.setattr("tandem.rewards.calling.LOAD_SECONDS", 1.0)
    head = f"import os, time\nif os.getpid() != {os.getpid()}: {body}\n"
    reward = own(f"{head}def compute_score({GIVEN}): return 1.0\n")
    made = pool(reward, num_workers=1, timeout=1.0, on_error="zero")
    if body == "os.fork()":
        assert [s.failed for s in made.score(texts("a", "b"))] == [False, False]
        return
    error = refused(RewardError, lambda: made.score(texts("a")))
    assert error.field == "custom_reward_function.path"


def test_the_server_and_the_keepers_have_one_thread(hostile, pool):
    pool(hostile("return 1.0"), num_workers=2).score(texts("1", "2", "3", "4"))
    (server,) = servers()
    keepers = server.children()
    assert len(keepers) == 2 and [lifetime.threads(each.pid) for each in (server, *keepers)] == [1, 1, 1]


@pytest.mark.parametrize("suspended", [False, True])
def test_a_server_that_dies_costs_no_batch(hostile, pool, suspended):
    """A suspended server does not take the request before it dies."""
    made = pool(hostile("os.kill(os.getpid(), 9)"), num_workers=1, on_error="zero")
    made.score(texts("1"))
    (server,) = servers()
    if suspended:
        server.suspend()
    end = threading.Timer(2.0 if suspended else 0.0, server.kill)
    end.start()
    if not suspended:
        end.join()
    assert scores(made, "attack", "2") == [0.0, 2.0]
    end.join()


def test_a_program_with_many_open_files_gets_its_scores(hostile, pool):
    for each in servers():
        each.kill()  # the next process gets a socket with the same number
        each.wait(30)
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert scores(pool(hostile("return 1.0"), num_workers=1), "1", "2") == [1.0, 2.0]
    finally:
        for each in many:
            os.close(each)
