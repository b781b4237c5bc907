"""OpenRLHF's options become configs: the calculations are right, and the written config can be loaded."""

import random

import pytest
import yaml

from tandem.cli.main import main
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, value_at
from tandem.errors import ConfigError
from tandem.migrate.openrlhf import TABLE, migrate_openrlhf
from tests.support.words import words

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


def values_of(config, text):
    """Return the values of the keys in a text, and the values that the text gives them."""
    wanted = dict(word.split("=", 1) for word in words(text))
    found = {name: value_at(config, name) for name in wanted}
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    return listed, {name: yaml.safe_load(value) for name, value in wanted.items()}


def test_the_defaults_load_and_are_openrlhfs(converted):
    optim = "betas=[0.9, 0.95] AT.weight_decay=0.0 AT.min_lr_ratio=0.1 AT.lr_scheduler_type=cosine"
    optim = f"AT.{optim} AT.lr_warmup_steps_ratio=0.03"
    text = f"""G.adv_estimator=gae G.use_kl_in_reward=true G.kl_penalty=k1 G.kl_ctrl.kl_coef=0.01
        A.optim.lr=0.000001 critic.optim.lr=0.000009 A.clip_ratio_c=1000000000 D.max_response_length=1024
        {optim.replace("AT", "A.optim")} {optim.replace("AT", "critic.optim")}"""
    found, wanted = values_of(converted(), text)
    assert found == wanted


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
    text = """G.adv_estimator=grpo A.use_kl_loss=true A.kl_loss_type=k3 A.kl_loss_coef=0.001 F.enable=true
        A.clip_ratio_low=0.2 A.clip_ratio_high=0.3 custom_reward_function.name=reward_func R.name=vllm
        M.lora_rank=8 A.optim.optimizer=adamw_cpu T.logger=[console, wandb] D.train_max_samples=500
        T.save_freq=20 C.rollout_is=token"""
    found, wanted = values_of(converted(*GROUPED.split()), text)
    assert found == wanted


def test_a_kl_of_no_weight_is_left_out(converted):
    config = converted(*GROUPED.replace("1e-3", "0").split())
    assert (config.actor_rollout_ref.actor.use_kl_loss, config.algorithm.use_kl_in_reward) == (False, False)


def test_what_has_no_counterpart_is_named():
    options = (
        "--async_train --enable_ema --normalize_reward --label_key x --no_such 1 --remote_rm_url http://x"
    )
    refused = {row.name for row in migrate_openrlhf(options.split()).rows if row.verdict == "refused"}
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
