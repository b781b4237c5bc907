"""The same config gives the same numbers in one process, on two and four ranks, and with separate roles.

These are real runs on Ray with FSDP2 over gloo. There are seven prompts, so no number of ranks divides the
batch.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.support.runs import Lab

pytestmark = pytest.mark.e2e

STEPS = 5
PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.lam=0.95",
    "data.train_batch_size=7",
    "actor_rollout_ref.actor.ppo_mini_batch_size=7",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.rollout.n=1",
    "critic.ppo_mini_batch_size=7",
    "critic.optim.lr=0.01",
    f"trainer.total_training_steps={STEPS}",
)
FP64 = tuple(
    f"{model}.fsdp_config.model_dtype=fp64"
    for model in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
)
LAYOUTS = {
    "two colocated": ("trainer.n_gpus_per_node=2",),
    "four colocated": (
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=4",
        "critic.fsdp_config.fsdp_size=2",
    ),
    "apart": (
        "trainer.resource_pools={policy: [2], value: [1], scores: [1]}",
        "trainer.placement={actor_rollout: policy, critic: value, reward: scores}",
    ),
    "rollout apart": (
        "trainer.resource_pools={trains: [2], samples: [2]}",
        "trainer.placement={actor: trains, rollout: samples}",
    ),
    "layers split": (
        "trainer.resource_pools={trains: [2], samples: [1]}",
        "trainer.placement={actor: trains, rollout: samples}",
        *(
            f"{model}.fsdp_config.tensor_parallel_size=2"
            for model in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        ),
    ),
}
POLICY_STAGES = tuple(
    f"{model}.fsdp_config.pipeline_parallel_size=2"
    for model in ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
)
LAYOUTS |= {
    "stages colocated": (
        "trainer.n_gpus_per_node=2",
        *POLICY_STAGES,
        "critic.fsdp_config.pipeline_parallel_size=2",
        "critic.fsdp_config.pipeline_schedule=gpipe",
    ),
    "stages apart": (
        "trainer.resource_pools={trains: [2], samples: [1]}",
        "trainer.placement={actor: trains, rollout: samples}",
        *POLICY_STAGES,
    ),
}
ADAPTERS = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "critic.model.lora_rank=4",
)
ADAPTED = {
    "rollout splits layers": (
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    ),
    "rollout apart, layers and sequences split": (
        "trainer.resource_pools={trains: [4], samples: [1]}",
        "trainer.placement={actor: trains, rollout: samples}",
        "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    ),
}
LONG = set(LAYOUTS) - {"rollout apart"}
LEARNT = ("reward/mean", "actor/loss", "actor/kl", "actor/entropy", "actor/grad_norm", "critic/loss")


def learnt(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [[row[name] for name in LEARNT] for row in rows]


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 6
"""
"""A reward that differs between samples even for an untrained model."""


def run(lab: Lab, name: str, *words: str) -> list[dict[str, Any]]:
    reward = lab.folder / "reward.py"
    reward.write_text(REWARD)
    rows = lab.run(name, *PPO, f"custom_reward_function.path={reward}", *words).rows
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return rows


@pytest.fixture(scope="module")
def alone(lab: Lab) -> dict[str, list[list[float]]]:
    """Run in one process, in each precision."""
    return {
        "fp64": learnt(run(lab, "alone64", *FP64)),
        "fp32": learnt(run(lab, "alone32")),
    }


@pytest.fixture(scope="module")
def adapted(lab: Lab) -> list[list[float]]:
    """Run with adapters in one process."""
    return learnt(run(lab, "adapters", *FP64, *ADAPTERS))


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in LAYOUTS],
)
def test_float64_agrees_to_1e_9(
    lab: Lab,
    alone: dict[str, list[list[float]]],
    ray_cluster: None,
    layout: str,
) -> None:
    """The run also profiles a step, on all processes."""
    name = f"fp64 {layout}"
    rows = run(lab, name, *FP64, *LAYOUTS[layout], "trainer.profile.steps=[3]")
    for got, expected in zip(learnt(rows), alone["fp64"], strict=True):
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert rows[-1]["controller/value_bytes"] == 0
    with gzip.open(lab.folder / name / "profile" / "step_000003.json.gz") as file:
        events = json.load(file)["traceEvents"]
    tracks = {e["args"]["name"]: e["pid"] for e in events if e.get("name") == "thread_name"}
    ranks = {pid for name, pid in tracks.items() if name.startswith(("actor rank", "rollout rank"))}
    operators = {e["pid"] for e in events if e.get("cat") == "cpu_op"}
    assert len(ranks) > 1 and ranks <= operators
    assert {e["name"] for e in events if e.get("ph") == "B"} >= {"step", "gen", "values", "update_actor"}


@pytest.mark.timeout(480)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["two colocated", "four colocated"])
def test_float32_agrees_to_1e_5(
    lab: Lab,
    alone: dict[str, list[list[float]]],
    ray_cluster: None,
    layout: str,
) -> None:
    rows = run(lab, f"fp32 {layout}", *LAYOUTS[layout])
    for got, expected in zip(learnt(rows), alone["fp32"], strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if "apart" in name else ()) for name in ADAPTED]
)
def test_adapters_agree_to_1e_9(lab: Lab, adapted: list[list[float]], ray_cluster: None, layout: str) -> None:
    rows = run(lab, f"adapters {layout}", *FP64, *ADAPTERS, *ADAPTED[layout])
    for got, expected in zip(learnt(rows), adapted, strict=True):
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert rows[-1]["rollout/log_prob_diff_max"] < 1e-9
