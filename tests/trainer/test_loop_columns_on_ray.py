"""The loop's columns, the exact KL and the reference reset on Ray give the numbers of one process."""

from __future__ import annotations

import pytest

from tests.support import loop_columns
from tests.support.runs import Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORDS = (
    "data.train_batch_size=7 A.ppo_mini_batch_size=7 A.fsdp_config.model_dtype=fp64",
    "REF.fsdp_config.model_dtype=fp64 A.use_kl_loss=true A.kl_loss_type=full A.kl_loss_coef=0.1",
    "algorithm.use_kl_in_reward=true algorithm.kl_penalty=full REF.reset_interval=2",
    "custom_reward_function.name=score steps=3 trainer.save_freq=3",
)
APART = "Q={trains: [2], compares: [1]} P={actor_rollout: trains, ref: compares}"
LEARNT = (
    "reward/mean", "reward/after_kl", "critic/baseline/mean", "advantages/mean", "actor/loss", "actor/kl",
    "actor/kl_in_reward", "actor/grad_norm", "actor/reference_step",
)  # fmt: skip


@pytest.mark.timeout(480)
def test_roles_apart_find_the_same(lab: Lab, ray_cluster: None) -> None:
    own = loop_columns.write(lab.folder)
    words = (*WORDS, f"custom_reward_function.path={own} algorithm.adv_estimator={own}:everything")
    alone = lab.run("alone", *words).rows
    apart = lab.run("apart", *words, APART)
    for got, expected in zip(apart.rows, alone, strict=True):
        for name in LEARNT:
            assert got[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-9), name
    assert [row["actor/reference_step"] for row in alone] == [0, 0, 2]
    assert apart.rows[-1]["controller/value_bytes"] == 0
    assert (apart.folder / "checkpoints" / "step_000003" / "ref").is_dir()
