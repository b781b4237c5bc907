"""Seven prompts in one process, on two and four ranks (no number divides them), and with separate roles."""

import gzip
import json
from functools import cache
from typing import Any

import pytest

from tests.support.runs import Lab

pytestmark = pytest.mark.e2e

STEPS = 5
PPO = (
    "GAE algorithm.lam=0.95 data.train_batch_size=7 R.n=1 A.ppo_mini_batch_size=7 A.ppo_epochs=2",
    "A.use_kl_loss=true A.kl_loss_coef=0.1 A.entropy_coeff=0.01",
    f"critic.ppo_mini_batch_size=7 critic.optim.lr=0.01 steps={STEPS}",
)


def models(key: str, *names: str) -> str:
    return " ".join(f"{name}.fsdp_config.{key}" for name in names)


FP64 = models("model_dtype=fp64", "A", "REF", "critic")
TWO = "trainer.n_gpus_per_node=2"
SAMPLED_APART = "P={actor: trains, rollout: samples}"
APART = f"Q={{trains: [2], samples: [1]}} {SAMPLED_APART}"
STAGES = models("pipeline_parallel_size=2", "A", "REF")
ROLLOUT_SPLIT = "R.tensor_model_parallel_size=2"
LAYOUTS = {
    "two colocated": TWO,
    "four colocated": f"trainer.n_gpus_per_node=4 {ROLLOUT_SPLIT} A.ulysses_sequence_parallel_size=2 "
    "critic.ulysses_sequence_parallel_size=4 critic.fsdp_config.fsdp_size=2",
    "apart": "Q={policy: [2], value: [1], scores: [1]} "
    "P={actor_rollout: policy, critic: value, reward: scores}",
    "rollout apart": f"Q={{trains: [2], samples: [2]}} {SAMPLED_APART}",
    "layers split": f"{APART} {models('tensor_parallel_size=2', 'A', 'REF', 'critic')}",
    "stages colocated": f"{TWO} {STAGES} critic.fsdp_config.pipeline_parallel_size=2 "
    "critic.fsdp_config.pipeline_schedule=gpipe",
    "stages apart": f"{APART} {STAGES}",
}
ADAPTED = {
    "rollout splits layers": f"{TWO} {ROLLOUT_SPLIT} A.ulysses_sequence_parallel_size=2",
    "rollout apart, layers and sequences split": f"Q={{trains: [4], samples: [1]}} {SAMPLED_APART} "
    "A.fsdp_config.tensor_parallel_size=2 A.ulysses_sequence_parallel_size=2",
}
ADAPTERS = f"{FP64} M.lora_rank=4 M.lora_alpha=8 critic.model.lora_rank=4"
KINDS = {"fp64": FP64, "fp32": "", "adapters": ADAPTERS}
CASES = [
    *(("fp64", layout) for layout in LAYOUTS),
    *(("fp32", layout) for layout in ("two colocated", "four colocated")),
    *(("adapters", layout) for layout in ADAPTED),
]
LEARNT = ("reward/mean", "actor/loss", "actor/kl", "actor/entropy", "actor/grad_norm", "critic/loss")


def learnt(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [[row[name] for name in LEARNT] for row in rows]


def run(lab: Lab, name: str, *words: str) -> list[dict[str, Any]]:
    rows = lab.run(name, *PPO, lab.letters, *words).rows
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return rows


@pytest.fixture(scope="module")
def alone(lab):
    return cache(lambda kind: learnt(run(lab, f"{kind} alone", KINDS[kind])))


@pytest.mark.timeout(480)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_every_layout_gives_the_numbers_of_one_process(lab, alone, ray_cluster, kind, layout):
    name, limit = f"{kind} {layout}", 1e-5 if kind == "fp32" else 1e-9
    rows = run(lab, name, KINDS[kind], (LAYOUTS | ADAPTED)[layout], "trainer.profile.steps=[3]")
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
