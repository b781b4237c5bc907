from pathlib import Path
from typing import Any

import pytest

from tandem.observability.timers import read_timeline
from tandem.runtime import Placement, Role
from tandem.trainer.ppo import PPOTrainer
from tests.support.runs import Finished
from tests.support.scorers import make_scorer

SLOW = """
import time
from tandem.runtime import Dispatch, register
from tandem.workers.actor import ActorWorker
from tandem.workers.critic import CriticWorker
from tandem.workers.reward_model import RewardModelWorker

def wait(worker, what):
    with worker.timeline.phase(f"work on {what}"):
        time.sleep(1.0)

class SlowReference(ActorWorker):
    def compute_ref_log_prob(self, batch):
        wait(self, "ref")
        return super().compute_ref_log_prob(batch)

class SlowCritic(CriticWorker):
    def compute_values(self, batch):
        wait(self, "values")
        return super().compute_values(batch)

class SlowScorer(RewardModelWorker):
    def compute_rm_score(self, batch):
        wait(self, "scores")
        return super().compute_rm_score(batch)
"""
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(480)]


def spans(timeline: Path, phase: str) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    begun: dict[tuple[int, int], float] = {}
    for event in read_timeline(timeline):
        if event.get("name") == phase and event["ph"] == "B":
            begun[event["pid"], event["tid"]] = event["ts"] / 1e6
        elif event.get("name") == phase and event["ph"] == "E":
            found.append((begun[event["pid"], event["tid"]], event["ts"] / 1e6))
    return found


def test_reference_critic_and_reward_model_overlap(lab, ray_cluster):
    file = lab.folder / "slow_workers.py"
    file.write_text(SLOW)
    scorer = make_scorer(lab.folder / "scorer", lab.model)
    finished = lab.run(
        "overlap",
        f"GAE A.use_kl_loss=true reward_model.enable=true reward_model.model.path={scorer} steps=3",
        "Q={policy: [1], frozen: [1], value: [1], scores: [1]}",
        "P={actor_rollout: policy, ref: frozen, critic: value, reward_model: scores}",
        f"W.ref={file}:SlowReference W.critic={file}:SlowCritic W.reward_model={file}:SlowScorer",
    )
    timeline = finished.folder / "timeline.json"
    steps = [spans(timeline, f"work on {phase}") for phase in ("ref", "values", "scores")]
    assert [len(occurrences) for occurrences in steps] == [3, 3, 3]
    for together in zip(*steps, strict=True):
        lengths = [end - begin for begin, end in together]
        elapsed = max(end for _, end in together) - min(begin for begin, _ in together)
        hidden = (sum(lengths) - elapsed) / (sum(lengths) - max(lengths))
        assert hidden >= 0.8, together
    row = finished.rows[-1]
    for role, (begin, end) in zip(("ref", "critic", "reward_model"), together, strict=True):
        assert row[f"perf/busy_share/{role}"] >= 0.9 * (end - begin) / row["timing/step"]


@pytest.fixture(scope="module")
def words(lab):
    fp64 = "A.fsdp_config.model_dtype=fp64 critic.fsdp_config.model_dtype=fp64"
    return (f"GAE {lab.letters} {fp64}", "trainer.save_freq=2 steps=4")


@pytest.fixture(scope="module")
def undisturbed(lab, words):
    return lab.run("undisturbed", *words).rows


def assert_undisturbed(run: Finished, undisturbed: list[dict[str, Any]]) -> None:
    for got, expected in zip(run.rows, undisturbed, strict=True):
        for name in ("reward/mean", "actor/loss", "critic/loss"):
            assert got[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-9)


def test_reallocated_in_mid_run(lab, words, undisturbed, ray_cluster):
    apart = Placement({"policy": [1], "value": [1]}, {Role.ActorRollout: "policy", Role.Critic: "value"})
    sizes: list[int] = []

    class Mover(PPOTrainer):
        def at_step_boundary(self, step: int) -> None:
            if step == 2:
                sizes.append(self.roles.actor.world_size)
                self.reallocate(apart)
                sizes.append(self.roles.actor.world_size)

    finished = lab.run("moved", *words, "trainer.n_gpus_per_node=2", trainer=Mover)
    assert sizes == [2, 1]
    assert_undisturbed(finished, undisturbed)


def test_resumed_with_other_pools(lab, words, undisturbed, ray_cluster):
    lab.run("resized", *words, "trainer.n_gpus_per_node=2 steps=2")
    apart = "Q={policy: [1], value: [2]} P={actor_rollout: policy, critic: value}"
    finished = lab.run("resized", *words, apart)
    assert any("resumed from" in sentence for sentence in finished.said)
    assert_undisturbed(finished, undisturbed)


def test_reward_models_and_references_on_pools_of_their_own(lab, ray_cluster):
    safe, helpful = (make_scorer(lab.folder / name, lab.model, seed=i) for i, name in enumerate("ab"))
    words = (
        f"{lab.letters} A.fsdp_config.model_dtype=fp64 reward_model.fsdp_config.model_dtype=fp64",
        "reward_model.enable=true",
        f"reward_model.models={{safe: {{path: {safe}}}, helpful: {{path: {helpful}, normalize: true}}}}",
        "A.use_kl_loss=true REF.models={start: {}, again: {weight: 0.5}}",
    )
    here = lab.run("here", *words)
    apart = lab.run(
        "apart",
        *words,
        "Q={policy: [1], scores: [2], frozen: [1], more: [1]}",
        "P={actor_rollout: policy, reward_model: scores, reward_model.safe: more, "
        "ref.start: frozen, ref.again: more}",
    )
    busy = {name.rpartition("/")[2] for name in apart.rows[-1] if name.startswith("perf/busy_share/")}
    assert {"reward_model.safe", "reward_model.helpful", "ref.start", "ref.again", "reward"} <= busy
    for one, other in zip(here.rows, apart.rows, strict=True):
        for name in (
            *("reward/mean", "reward/extra/safe", "reward/extra/helpful/normalized", "actor/loss"),
            *("reward/running_std/helpful", "actor/kl/start", "actor/kl/again", "actor/grad_norm"),
        ):
            assert other[name] == pytest.approx(one[name], rel=1e-6, abs=1e-9), name
