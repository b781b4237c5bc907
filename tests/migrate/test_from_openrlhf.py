"""OpenRLHF's options become configs: the calculations are right, and the written config can be loaded."""

import random

import pytest

from tandem.cli.main import main
from tandem.config.root import TrainConfig
from tandem.config.schema import keys
from tandem.errors import ConfigError
from tandem.migrate.openrlhf import TABLE, migrate_openrlhf

GROUPED = """
--advantage_estimator group_norm --n_samples_per_prompt 8 --use_kl_loss --kl_estimator k3 --init_kl_coef 1e-3
--eps_clip_low_high 0.2 0.3 --dynamic_filtering --remote_rm_url reward.py --vllm_num_engines 1 --bf16
--vllm_gpu_memory_utilization 0.6 --colocate_all_models --gradient_checkpointing --use_wandb KEY
--max_samples 500 --enable_vllm_is_correction --save_steps 20 --load_checkpoint --lora_rank 8 --adam_offload
--pretrain model
"""


@pytest.fixture
def converted(load):
    """Return a function that loads the config for options."""
    return lambda *options: load(migrate_openrlhf(["--actor_num_gpus_per_node", "1", *options]))


def test_verdicts_name_keys_that_exist():
    for name, rule in TABLE.items():
        assert not rule.is_one_key or set(rule.now) <= keys(TrainConfig).keys(), name
        assert rule.is_one_key or rule.reason, name


def test_the_defaults_load_and_are_openrlhfs(converted):
    config = converted()
    algorithm = config.algorithm
    assert (algorithm.adv_estimator, algorithm.use_kl_in_reward, algorithm.kl_penalty) == ("gae", True, "k1")
    assert algorithm.kl_ctrl.kl_coef == 0.01
    for optim in (config.actor_rollout_ref.actor.optim, config.critic.optim):
        assert (optim.betas, optim.weight_decay, optim.min_lr_ratio) == ((0.9, 0.95), 0.0, 0.1)
        assert (optim.lr_scheduler_type, optim.lr_warmup_steps_ratio) == ("cosine", 0.03)
    assert (config.actor_rollout_ref.actor.optim.lr, config.critic.optim.lr) == (1e-6, 9e-6)
    assert config.actor_rollout_ref.actor.clip_ratio_c == 1e9
    assert config.data.max_response_length == 1024


def test_sizes_count_prompts(converted):
    draw = random.Random()
    for _ in range(10):
        n, prompts, updates = draw.choice((1, 2, 8)), draw.randrange(1, 9), draw.randrange(1, 5)
        config = converted(
            *("--n_samples_per_prompt", str(n), "--rollout_batch_size", str(prompts * updates)),
            *("--train_batch_size", str(prompts * n), "--micro_train_batch_size", "1"),
            *("--advantage_estimator", "group_norm" if n > 1 else "gae"),
        )
        assert config.data.train_batch_size == prompts * updates
        assert config.actor_rollout_ref.actor.ppo_mini_batch_size == prompts
    with pytest.raises(ConfigError, match="splits a group of 3"):
        migrate_openrlhf(["--n_samples_per_prompt", "3"])


def test_a_group_method_with_its_options(converted):
    config = converted(*GROUPED.split())
    actor = config.actor_rollout_ref.actor
    assert (config.algorithm.adv_estimator, actor.use_kl_loss, actor.kl_loss_type) == ("grpo", True, "k3")
    assert (actor.kl_loss_coef, actor.clip_ratio_low, actor.clip_ratio_high) == (1e-3, 0.2, 0.3)
    assert config.algorithm.filter_groups.enable and config.custom_reward_function.name == "reward_func"
    assert (config.actor_rollout_ref.rollout.name, actor.optim.optimizer) == ("vllm", "adamw_cpu")
    assert config.trainer.logger == ("console", "wandb")
    assert (config.data.train_max_samples, config.trainer.save_freq) == (500, 20)
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert config.actor_rollout_ref.model.lora_rank == 8


def test_a_kl_of_no_weight_is_left_out(converted):
    config = converted(*GROUPED.replace("1e-3", "0").split())
    assert (config.actor_rollout_ref.actor.use_kl_loss, config.algorithm.use_kl_in_reward) == (False, False)


def test_what_has_no_counterpart_is_named():
    words = "--async_train --enable_ema --normalize_reward --label_key x --no_such 1 --remote_rm_url http://x"
    refused = {row.name for row in migrate_openrlhf(words.split()).rows if row.verdict == "refused"}
    assert refused == {"async_train", "enable_ema", "normalize_reward", "no_such", "remote_rm_url"}


def test_a_script_is_read(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(
        "set -x\nN=4\nray job submit --address=http://127.0.0.1:8265 "
        '--runtime-env-json=\'{"working_dir": "/x"}\' -- python3 -m openrlhf.cli.train_ppo_ray \\\n'
        "  --n_samples_per_prompt $N --advantage_estimator rloo \\\n  --zero_stage 3 $1\n"
    )
    out = tmp_path / "made.yaml"
    assert main(["from-openrlhf", str(script), "--bf16", "-o", str(out)]) == 3
    said = capsys.readouterr().err
    assert "refused, so the config lacks them: advantage_estimator (exit status 3)" in said
    lines = [line.split() for line in said.splitlines()]
    assert ["n_samples_per_prompt", "4", "renamed"] in [line[:3] for line in lines]
    assert ["zero_stage", "3", "ignored"] in [line[:3] for line in lines]
    assert "adv_estimator: rloo" in out.read_text()
    assert "dtype: bf16" in out.read_text()
    script.write_text("python3 -m openrlhf.cli.train_ppo_ray --label_key answer")
    assert main(["from-openrlhf", str(script), "-o", str(out)]) == 0
    assert main(["from-openrlhf", str(tmp_path / "none.sh")]) == 1
