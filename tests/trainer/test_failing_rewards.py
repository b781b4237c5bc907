import json
import time
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from tandem.errors import RewardError
from tandem.runtime import Dispatch, WorkerGroup, register
from tandem.runtime.local_backend import LocalBackend
from tandem.runtime.resource_pool import ResourcePool
from tandem.runtime.worker import Worker
from tandem.sandbox import local, protections
from tandem.trainer import steps
from tests.support.tiny import problem, write_rows

SOURCE = """
import os, signal, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("scored in", os.getpid())
    if extra_info["index"] % 4 == 1:
        time.sleep(600)
    if extra_info["index"] % 4 == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0 + len(solution_str)
"""


@pytest.fixture
def words(lab):
    return f"{lab.reward(SOURCE)} reward.timeout=1.5 reward.num_workers=2 data.shuffle=false"


def failures(run):
    """Return which samples of the first step the reward fails for."""
    return np.isin([json.loads(info)["index"] % 4 for info in run.samples(1)["extra_info"]], [1, 2])


def test_a_failed_score_counts_as_nothing(lab, words, capfd):
    finished = lab.run("zero", words, "reward.on_error=zero")
    failed, table = failures(finished), finished.samples(1)
    assert [score == 0 for score in table["scores"]] == failed.tolist()
    shares = [row["reward/failed"] for row in finished.rows]
    assert shares[0] == pytest.approx(failed.mean()) and sum(shares) > 0
    ended = [row.get("reward/timeouts", 0) + row.get("reward/died", 0) for row in finished.rows]
    assert sum(ended) == sum(round(12 * share) for share in shares)
    printed = "".join(capfd.readouterr())
    assert printed.count("a score failed, so it counts as 0") == 1
    assert "of the data, data_source 'arithmetic'" in printed
    assert "scored in" in (finished.folder / "log" / "rewards-0.log").read_text()
    assert "scored in" not in printed
    children = psutil.Process().children(recursive=True)
    servers = [p for p in children if "tandem.rewards" in str(p.as_dict(["cmdline"], ad_value=""))]
    assert len(servers) <= 1  # only the server that forks processes may be left


@pytest.mark.slow
def test_a_failed_score_leaves_its_sample_out(lab, words, monkeypatch):
    watched = Mock(wraps=steps.minibatches)
    monkeypatch.setattr("tandem.trainer.ppo.minibatches", watched)
    finished = lab.run("drop", words, "reward.on_error=drop steps=1")
    failed, table = failures(finished), finished.samples(1)
    assert failed.any()
    scores = np.array(table["scores"])
    assert (scores[failed] == 0).all()  # all responses to these prompts failed
    assert finished.rows[0]["reward/failed"] == failed.mean()
    (call,) = watched.call_args_list
    assert call.args[4].tolist() == failed.tolist()


def test_a_reward_that_hangs_ends_the_run_with_its_name(lab, words):
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"took more than 1.5 s|exit code -9"):
        lab.run("raise", words)
    assert time.monotonic() - began < 60


class Waiting(Worker):
    in_thread = True

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def slow(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def raises(self) -> None:
        raise ValueError("told")


def test_in_one_process_calls_of_a_worker_aside_run_beside_the_others():
    group = WorkerGroup(LocalBackend(), Waiting, ResourcePool([1], "aside", on_device=False), role="waits")
    began = time.monotonic()
    first, second = group.slow(0.5), group.slow(0.25)
    assert time.monotonic() - began < 0.2
    assert (second.get(), first.get()) == ([0.25], [0.5])
    assert time.monotonic() - began == pytest.approx(0.75, abs=0.2)
    with pytest.raises(ValueError, match="told"):
        group.raises().get()
    group.shutdown()


def rows(folder, source, truth):
    """Write a file of sums whose rows have the data source and the ground truth."""
    reward_model = {"style": "rule", "ground_truth": truth}
    made = [problem(1, b) | {"data_source": source, "reward_model": reward_model} for b in range(2, 10)]
    return write_rows(folder / f"{source}.parquet", made)


@pytest.mark.parametrize(
    ("source", "truth", "wrong"),
    [("math_dapo", "34", -1), ("searchR1_nq", {"target": ["Paris", "Lutetia"]}, 0)],
)
def test_rows_train_as_they_are(lab, tmp_path, source, truth, wrong):
    data = rows(tmp_path, source, truth)
    finished = lab.run(source, f"data.train_files={data} steps=1")
    assert finished.rows[0]["reward/mean"] == wrong  # no untrained model answers in the required form


def test_programs_train_in_a_sandbox_which_is_said(lab, tmp_path):
    data = rows(tmp_path, "codeforces", '{"inputs": ["1"], "outputs": ["1"]}')
    finished = lab.run("codeforces", f"data.train_files={data} steps=1")
    assert finished.rows[0]["reward/extra/tests"] == 1
    assert sum("programs that answer codeforces run here, under " in said for said in finished.said) == 1


def test_programs_are_refused_before_any_step_without_a_sandbox(lab, tmp_path, monkeypatch):
    for kind in (protections.Sandlock, protections.Bubblewrap):
        monkeypatch.setattr(kind, "version", lambda: None)
    local._working_sandbox.cache_clear()
    data = rows(tmp_path, "apps", '{"inputs": ["1"], "outputs": ["1"]}')
    with pytest.raises(RewardError, match="sandlock is not installed; bubblewrap is not installed"):
        lab.trainer(tmp_path / "run", f"data.train_files={data}")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
