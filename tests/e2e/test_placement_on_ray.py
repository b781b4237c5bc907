from pathlib import Path
from typing import Any

import pytest

from tandem.observability.timers import read_timeline
from tandem.runtime import Placement, Role
from tandem.trainer.ppo import PPOTrainer
from tests.e2e.shop import REWARD
from tests.support.runs import Finished, Lab
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
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "reward_model.enable=true",
        f"reward_model.model.path={scorer}",
        "trainer.resource_pools={policy: [1], frozen: [1], value: [1], scores: [1]}",
        "trainer.placement={actor_rollout: policy, ref: frozen, critic: value, reward_model: scores}",
        f"trainer.worker_classes.ref={file}:SlowReference",
        f"trainer.worker_classes.critic={file}:SlowCritic",
        f"trainer.worker_classes.reward_model={file}:SlowScorer",
        "trainer.total_training_steps=3",
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


def varied(lab: Lab) -> Path:
    (lab.folder / "varied.py").write_text(REWARD)
    return lab.folder / "varied.py"


def learnt(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [[row["reward/mean"], row["actor/loss"], row["critic/loss"]] for row in rows]


@pytest.fixture(scope="module")
def words(lab):
    return (
        "algorithm.adv_estimator=gae",
        f"custom_reward_function.path={varied(lab)}",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp64",
        "critic.fsdp_config.model_dtype=fp64",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
    )


@pytest.fixture(scope="module")
def undisturbed(lab, words):
    return learnt(lab.run("undisturbed", *words).rows)


def assert_undisturbed(run: Finished, undisturbed: list[list[float]]) -> None:
    for got, expected in zip(learnt(run.rows), undisturbed, strict=True):
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_reallocated_in_mid_run(
    lab, words, undisturbed, ray_cluster,
    monkeypatch,
):  # fmt: skip
    apart = Placement({"policy": [1], "value": [1]}, {Role.ActorRollout: "policy", Role.Critic: "value"})
    moved: list[int] = []

    def at_step_boundary(trainer: PPOTrainer, step: int) -> None:
        if step == 2:
            assert trainer.roles.actor.world_size == 2
            trainer.reallocate(apart)
            moved.append(trainer.roles.actor.world_size)

    monkeypatch.setattr(PPOTrainer, "at_step_boundary", at_step_boundary)
    finished = lab.run("moved", *words, "trainer.n_gpus_per_node=2")
    assert moved == [1]
    assert_undisturbed(finished, undisturbed)


def test_resumed_with_other_pools(lab, words, undisturbed, ray_cluster):
    lab.run("resized", *words, "trainer.n_gpus_per_node=2", "trainer.total_training_steps=2")
    finished = lab.run(
        "resized",
        *words,
        "trainer.resource_pools={policy: [1], value: [2]}",
        "trainer.placement={actor_rollout: policy, critic: value}",
    )
    assert any("resumed from" in sentence for sentence in finished.said)
    assert_undisturbed(finished, undisturbed)


def test_reward_models_and_references_on_pools_of_their_own(lab, ray_cluster):
    models = ", ".join(
        f"{name}: {{path: {make_scorer(lab.folder / name, lab.model, seed=seed)}, normalize: {seed == 1}}}"
        for seed, name in enumerate(("safe", "helpful"))
    )
    words = (
        f"custom_reward_function.path={varied(lab)}",
        "reward_model.enable=true",
        f"reward_model.models={{{models.replace('True', 'true').replace('False', 'false')}}}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.ref.models={start: {}, again: {weight: 0.5}}",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp64",
        "reward_model.fsdp_config.model_dtype=fp64",
    )
    here = lab.run("here", *words)
    apart = lab.run(
        "apart",
        *words,
        "trainer.resource_pools={policy: [1], scores: [2], frozen: [1], more: [1]}",
        "trainer.placement={actor_rollout: policy, reward_model: scores, reward_model.safe: more, "
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
