import pytest

from tests.support import loop_columns
from tests.support.runs import REWARD_HEAD

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(480)]

COLUMNS = (
    "data.train_batch_size=7 A.ppo_mini_batch_size=7 A.fsdp_config.model_dtype=fp64",
    "REF.fsdp_config.model_dtype=fp64 A.use_kl_loss=true A.kl_loss_type=full A.kl_loss_coef=0.1",
    "algorithm.use_kl_in_reward=true algorithm.kl_penalty=full REF.reset_interval=2",
    "steps=3 trainer.save_freq=3",
)
APART = "Q={trains: [2], compares: [1]} P={actor_rollout: trains, ref: compares}"
SAMPLING = (
    "F.enable=true F.max_num_gen_batches=20 algorithm.mask_truncated_completions=true",
    "reward_model.overlong_buffer={enable: true, len: 3} data.sampler.class_name=PassRateSampler",
    "data.gen_batch_size=5 R.n_schedule={2: 4} R.stop=['1', '2', '3', '4'] A.fsdp_config.model_dtype=fp64",
    "A.adaptive_entropy={enabled: true, target_entropy: 9}",
)
BOTH = ("reward/mean", "actor/loss", "actor/grad_norm")
LEARNT = (*BOTH, "reward/after_kl", "critic/baseline/mean", "advantages/mean")
LEARNT += ("actor/kl", "actor/kl_in_reward", "actor/reference_step")
COUNTED = ("gen_batches", "dropped_groups", "surplus_groups", "reward", "response_tokens")
SAMPLED = (*BOTH, "actor/entropy_coeff", *(f"sampling/{name}" for name in COUNTED))


def check(found, alone, names):
    for row, expected in zip(found.rows, alone.rows, strict=True):
        for name in names:
            assert row[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-9), name
    assert found.rows[-1]["controller/value_bytes"] == 0


def test_columns_the_exact_kl_and_resets_with_the_reference_apart(lab, ray_cluster):
    own = loop_columns.write(lab.folder)
    reward = f"custom_reward_function.path={own} custom_reward_function.name=score"
    words = (*COLUMNS, reward, f"algorithm.adv_estimator={own}:everything")
    alone, apart = lab.run("alone", *words), lab.run("apart", *words, APART)
    check(apart, alone, LEARNT)
    assert [row["actor/reference_step"] for row in alone.rows] == [0, 0, 2]
    assert (apart.folder / "checkpoints" / "step_000003" / "ref").is_dir()


def test_dynamic_sampling_a_sampler_and_rules_for_long_responses_on_two_ranks(lab, ray_cluster):
    code = f"import zlib\n{REWARD_HEAD}\n    return float(zlib.crc32(solution_str.encode()) % 8 == 0)\n"
    words = (*SAMPLING, lab.reward(code))
    alone, two = lab.run("one", *words), lab.run("two", *words, "trainer.n_gpus_per_node=2")
    check(two, alone, SAMPLED)
    assert sum(row["sampling/gen_batches"] for row in alone.rows) > 2
    for name in ("uid", "tokens"):
        assert [two.samples(step)[name] for step in (1, 2)] == [alone.samples(step)[name] for step in (1, 2)]
