import functools
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.data.mixture import Stretch
from tandem.protocol import DataProto
from tandem.runtime import BatchFuture
from tandem.trainer.perf import throughput
from tandem.trainer.prompts import Prompts
from tandem.trainer.steps import MiniBatching, Plan
from tandem.workers.actor import ActorWorker
from tandem.workers.data import DataFacts

SLOW = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.02)
    return 1.0
"""


def test_roles_report_their_time(lab):
    run = lab.run("usage", lab.reward(SLOW), lab.validated, "GAE reward.num_workers=1 trainer.test_freq=1")
    for row in run.rows[1:]:
        step_s = row["timing/step"]
        assert row["timing/reward"] >= 12 * 0.02
        assert row["perf/busy_share/reward"] == pytest.approx(row["timing/reward"] / step_s, rel=0.1)
        shares = [row[f"perf/busy_share/{role}"] for role in ("actor", "critic", "reward", "batch", "data")]
        assert all(0 < share < 1 for share in shares)
        # In one process roles take turns, except the reward, which waits for processes of its own.
        assert sum(shares) - row["perf/busy_share/reward"] <= 1.01
        assert sum(shares) > 0.5
        assert row["timing/update_actor"] / step_s < row["perf/busy_share/actor"]
        for name in ("wait_s", "transfer_s", "transfer_bytes"):
            assert row[f"perf/{name}/actor"] == 0
        assert not any(name.startswith("controller/") for name in row)
        assert row["timing/gen"] < step_s and row["timing/adv"] > 0


@pytest.mark.slow
def test_steps_are_not_charged_with_loading_and_saving(lab, monkeypatch):
    def slow(method: Any) -> Any:
        @functools.wraps(method)  # keeps the registration
        def run(self: ActorWorker, path: Path) -> None:
            with self.timeline.phase("slow"):
                time.sleep(1.0)
            self.observed.add_sum("actor/slow", 1.0)
            method(self, path)

        return run

    for name in ("save_checkpoint", "load_checkpoint"):
        monkeypatch.setattr(ActorWorker, name, slow(getattr(ActorWorker, name)))
    lab.run("saves", "trainer.save_freq=1")
    run = lab.run("saves", "trainer.save_freq=1 steps=4")
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    for row in run.rows:
        shares = sum(value for name, value in row.items() if name.startswith("perf/busy_share/"))
        assert shares - row["perf/busy_share/reward"] <= 1.01
        assert not {"timing/slow", "actor/slow"} & set(row)


def test_rates_are_those_of_the_processes_that_do_the_work():
    mini = MiniBatching(4, 2, False, 0)
    plan = Plan(total_steps=1, batch_samples=8, actor=mini, critic=mini, recompute_old=True)
    seconds = {"timing/gen": 2.0, "timing/update_actor": 4.0, "timing/old_log_prob": 1.0, "timing/step": 10.0}
    tokens = {"tokens/total": 1000.0, "tokens/response": 600.0}
    out = throughput(seconds, tokens, plan, {"actor": 5, "rollout": 2})
    wanted = {"gen": 600 / 2 / 2, "train": 2000 / 4 / 5, "log_prob": 1000 / 1 / 5}
    assert {name: out[f"perf/{name}_tokens_per_s_per_device"] for name in wanted} == wanted
    assert (out["perf/step_tokens_per_s"], out["timing_per_token_ms/update_actor"]) == (100, 2.0)


class Asked:
    """Data workers that record which batches were requested."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def train_batch(self, number: int) -> BatchFuture:
        self.numbers.append(number)
        return BatchFuture.of(DataProto(non_tensor_batch={"number": [number]}))

    def digest(self, rows: int) -> str:
        return f"of {rows}"

    def grow(self, stretches: tuple[Stretch, ...]) -> None:
        assert stretches == ((0, 9),)


def test_the_next_batch_is_asked_for_with_the_present_one():
    data = Asked()
    facts = DataFacts(9, 0, data.digest(9), ())
    prompts = Prompts(data, facts, 2, shuffle=True, seed=3)  # type: ignore[arg-type]
    assert data.numbers == []
    for number in (0, 1):
        assert prompts.next().get().non_tensor_batch["number"].tolist() == [number]
        assert data.numbers == [*range(number + 2)]
    state = prompts.state_dict()
    assert (state["epoch"], state["position"]) == (0, 4)
    prompts.load_state_dict({**state, "position": 0})
    assert prompts.next().get().non_tensor_batch["number"].tolist() == [0]
    assert data.numbers == [0, 1, 2, 0, 1]


def test_a_reward_function_for_whole_batches_sees_the_batch_as_a_whole(lab):
    code = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return "
    code += "[float(len(solution_strs))] * len(solution_strs)\ncompute_score.batched = True\n"
    run = lab.run("batched", lab.reward(code))
    assert run.samples(1)["scores"] == [12.0] * 12
    assert not run.trainer.roles.scores_parts
    assert lab.run("single").trainer.roles.scores_parts
