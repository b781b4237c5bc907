"""Dynamic sampling, a sampler, and the rules for long responses give the same numbers on Ray.

The controller never sees the values.
"""

from __future__ import annotations

import pytest

from tests.support.runs import Lab

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(zlib.crc32(solution_str.encode()) % 8 == 0)
"""
WORDS = (
    "F.enable=true F.max_num_gen_batches=20 algorithm.mask_truncated_completions=true",
    "reward_model.overlong_buffer.enable=true reward_model.overlong_buffer.len=3",
    "data.sampler.class_name=PassRateSampler data.gen_batch_size=5 R.n_schedule={2: 4}",
    "R.stop=['1', '2', '3', '4'] A.fsdp_config.model_dtype=fp64 A.adaptive_entropy.enabled=true",
    "A.adaptive_entropy.target_entropy=9",
)
NUMBERS = (
    "sampling/gen_batches", "sampling/dropped_groups", "sampling/surplus_groups", "sampling/reward",
    "sampling/response_tokens", "reward/mean", "actor/loss", "actor/entropy_coeff", "actor/grad_norm",
)  # fmt: skip


@pytest.mark.timeout(240)
def test_two_ranks_learn_from_the_samples_that_one_process_does(lab: Lab, ray_cluster: None) -> None:
    (lab.folder / "hashed.py").write_text(REWARD)
    words = (*WORDS, f"custom_reward_function.path={lab.folder / 'hashed.py'}")
    alone, two = lab.run("alone", *words), lab.run("two", *words, "trainer.n_gpus_per_node=2")
    for row, expected in zip(two.rows, alone.rows, strict=True):
        assert [row[name] for name in NUMBERS] == pytest.approx(
            [expected[name] for name in NUMBERS], rel=1e-9, abs=1e-9
        )
    assert sum(row["sampling/gen_batches"] for row in alone.rows) > 2
    for step in (1, 2):
        assert two.samples(step)["uid"] == alone.samples(step)["uid"]
        assert two.samples(step)["tokens"] == alone.samples(step)["tokens"]
    assert two.rows[-1]["controller/value_bytes"] == 0
