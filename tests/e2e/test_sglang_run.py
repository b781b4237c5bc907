"""Runs whose responses come from SGLang servers that their workers start; see `make test-sglang`."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import psutil
import pytest

from tandem.observability.run import read_metrics
from tests.e2e.shop import finish, start, train

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"),
]

LONG = "data.max_response_length=100 R.ignore_eos=true R.n=12 trainer.save_freq=1"
LIMITS = "A.ppo_max_token_len_per_gpu=400 REF.log_prob_max_token_len_per_gpu=400"
LIMITS += " R.log_prob_max_token_len_per_gpu=400"
LIMIT_S = 500  # a server takes half a minute to start, and longer on a busy machine
NAMED_S = 60.0


def document(shop, folder, *words):
    where = f"trainer.default_local_dir={folder} custom_reward_function.path={shop.reward}"
    return shop.document("R.name=sglang", where, *words)


def test_the_documents_command_line(shop):
    """Two ranks share one server, as in the document."""
    folder = shop.folder / "document"
    words = document(shop, folder, "R.tensor_model_parallel_size=2 trainer.n_gpus_per_node=2 T.device=cpu")
    done = train([*words, "trainer.total_training_steps=2"], shop.folder, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/log_prob_diff_max"] < 1e-4
        assert row["rollout/generated_tokens"] == row["tokens/response"]  # of one engine, not of two
        assert row["actor/grad_norm"] > 0
    assert (folder / "log" / "sglang_server_rank_0.log").exists()
    assert not (folder / "log" / "sglang_server_rank_1.log").exists()


def servers_of(process):
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "sglang" in " ".join(child.cmdline()) or "sglang" in child.name()
    ]


@pytest.mark.parametrize("killed", ["its worker", "all"])
def test_a_server_that_is_killed_is_named_and_the_run_goes_on(shop, killed):
    folder = shop.folder / killed.replace(" ", "_")
    words = document(shop, folder, LONG, LIMITS, "trainer.total_training_steps=3")
    process = start(words, shop.folder)
    metrics = folder / "metrics.jsonl"
    until = time.monotonic() + 400
    while not (metrics.exists() and read_metrics(metrics)) and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    time.sleep(0.5)  # the second step generates now
    found = servers_of(process)
    assert found
    began = time.monotonic()
    for server in found if killed == "all" else found[-1:]:
        os.kill(server.pid, signal.SIGKILL)
    done = finish(process)
    assert time.monotonic() - began < NAMED_S
    assert done.returncode == 1
    assert "SGLang's server ended" in done.stderr and "requests pending" in done.stderr
    assert not any(server.is_running() for server in found)
    assert [row["step"] for row in read_metrics(metrics)] == [1]

    resumed = train(words, shop.folder, limit_s=LIMIT_S)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stdout
    assert [row["step"] for row in read_metrics(metrics)] == [1, 2, 3]


def test_the_benchmark():
    program = [sys.executable, "benchmarks/rollout_vs_vllm.py", "--tiny", "--engines", "tandem", "sglang"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0 and "tandem / sglang" in done.stdout, done.stderr
