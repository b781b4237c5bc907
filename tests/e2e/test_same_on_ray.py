"""Seven prompts in one process, on two and four ranks (no number divides them), and with separate roles."""

import gzip
import json
from functools import cache
from typing import Any

import pytest

from tests.e2e.shop import REWARD
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
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"


def models(key: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{name}.fsdp_config.{key}" for name in names)


FP64 = models("model_dtype=fp64", ACTOR, REF, "critic")
TWO = ("trainer.n_gpus_per_node=2",)
SAMPLED_APART = "trainer.placement={actor: trains, rollout: samples}"
APART = ("trainer.resource_pools={trains: [2], samples: [1]}", SAMPLED_APART)
STAGES = models("pipeline_parallel_size=2", ACTOR, REF)
ROLLOUT_SPLIT = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
LAYOUTS = {
    "two colocated": TWO,
    "four colocated": (
        "trainer.n_gpus_per_node=4",
        ROLLOUT_SPLIT,
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=4",
        "critic.fsdp_config.fsdp_size=2",
    ),
    "apart": (
        "trainer.resource_pools={policy: [2], value: [1], scores: [1]}",
        "trainer.placement={actor_rollout: policy, critic: value, reward: scores}",
    ),
    "rollout apart": ("trainer.resource_pools={trains: [2], samples: [2]}", SAMPLED_APART),
    "layers split": (*APART, *models("tensor_parallel_size=2", ACTOR, REF, "critic")),
    "stages colocated": (
        *(*TWO, *STAGES, "critic.fsdp_config.pipeline_parallel_size=2"),
        "critic.fsdp_config.pipeline_schedule=gpipe",
    ),
    "stages apart": (*APART, *STAGES),
}
ADAPTERS = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "critic.model.lora_rank=4",
)
ADAPTED = {
    "rollout splits layers": (*TWO, ROLLOUT_SPLIT, f"{ACTOR}.ulysses_sequence_parallel_size=2"),
    "rollout apart, layers and sequences split": (
        *("trainer.resource_pools={trains: [4], samples: [1]}", SAMPLED_APART),
        f"{ACTOR}.fsdp_config.tensor_parallel_size=2",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
    ),
}
KINDS = {"fp64": FP64, "fp32": (), "adapters": (*FP64, *ADAPTERS)}
CASES = [
    *(("fp64", layout) for layout in LAYOUTS),
    *(("fp32", layout) for layout in ("two colocated", "four colocated")),
    *(("adapters", layout) for layout in ADAPTED),
]
QUICK = [("fp64", "rollout apart")]
LEARNT = ("reward/mean", "actor/loss", "actor/kl", "actor/entropy", "actor/grad_norm", "critic/loss")


def learnt(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [[row[name] for name in LEARNT] for row in rows]


def run(lab: Lab, name: str, *words: str) -> list[dict[str, Any]]:
    reward = lab.folder / "reward.py"
    reward.write_text(REWARD)
    rows = lab.run(name, *PPO, f"custom_reward_function.path={reward}", *words).rows
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return rows


@pytest.fixture(scope="module")
def alone(lab):
    return cache(lambda kind: learnt(run(lab, f"{kind} alone", *KINDS[kind])))


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_every_layout_gives_the_numbers_of_one_process(lab, alone, ray_cluster, kind, layout):
    name, limit = f"{kind} {layout}", 1e-5 if kind == "fp32" else 1e-9
    rows = run(lab, name, *KINDS[kind], *(LAYOUTS | ADAPTED)[layout], "trainer.profile.steps=[3]")
    for got, expected in zip(learnt(rows), alone(kind), strict=True):
        assert got == pytest.approx(expected, rel=limit, abs=limit)
    assert rows[-1]["controller/value_bytes"] == 0
    assert kind != "adapters" or rows[-1]["rollout/log_prob_diff_max"] < 1e-9
    with gzip.open(lab.folder / name / "profile" / "step_000003.json.gz") as file:
        events = json.load(file)["traceEvents"]
    tracks = {e["args"]["name"]: e["pid"] for e in events if e.get("name") == "thread_name"}
    ranks = {pid for name, pid in tracks.items() if name.startswith(("actor rank", "rollout rank"))}
    operators = {e["pid"] for e in events if e.get("cat") == "cpu_op"}
    assert len(ranks) > 1 and ranks <= operators
    assert {e["name"] for e in events if e.get("ph") == "B"} >= {"step", "gen", "values", "update_actor"}
