"""TRL's settings become configs: every field has a verdict, and the written config can be loaded."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli.main import main
from tandem.config.load import load_train_config
from tandem.config.schema import keys, value_at
from tandem.errors import ConfigError
from tandem.migrate.trl import COMMANDS, migrate
from tandem.migrate.trl_source import read_python, read_words
from tandem.migrate.trl_table import FIELDS, MODEL, SCRIPT, TABLES
from tests.support.words import rows, words

PEER = Path(__file__).parents[2] / ".peers" / "trl" / "bin" / "python"
A = "actor_rollout_ref.actor"


RULES = {**TABLES, "ModelConfig": MODEL, "ScriptArguments": SCRIPT}


@pytest.mark.parametrize("name", RULES)
def test_every_field_has_a_verdict_every_verdict_a_field_and_a_key_that_exists(name):
    assert set(RULES[name]) == set(FIELDS[name])
    train = keys(COMMANDS["GRPOConfig"][1])
    offline = {"data.max_length", "center_rewards_coefficient"}
    for rule in RULES[name].values():
        if rule.is_one_key and rule.now:
            assert rule.now[0] in train or rule.now[0] in offline, rule.now
        if not rule.is_one_key:
            assert rule.reason


@pytest.mark.skipif(not PEER.exists(), reason="TRL has an environment of its own: make peers")
def test_the_stored_fields_are_trls():
    code = (
        "import dataclasses, json, trl\n"
        "print(trl.__version__)\n"
        "print(json.dumps({c: {f.name: f.default for f in dataclasses.fields(getattr(trl, c)) "
        "if f.default is not dataclasses.MISSING} for c in ('GRPOConfig', 'RLOOConfig', 'SFTConfig', "
        "'RewardConfig', 'ModelConfig')}, default=str))"
    )
    ran = subprocess.run([str(PEER), "-c", code], capture_output=True, text=True, timeout=200, check=True)
    version, fields = ran.stdout.splitlines()[-2:]
    assert version.startswith("1.16.")
    for name, found in json.loads(fields).items():
        assert {field: FIELDS[name][field] for field in found} == found
        assert len(FIELDS[name]) - len(found) <= 2  # fields whose default differs in each process


@pytest.mark.parametrize("name", list(TABLES))
def test_the_defaults_load(name, load):
    load(migrate(name, {}, devices=1))


def test_sizes_count_prompts(load):
    draw = random.Random()
    for _ in range(20):
        n, devices, groups = draw.choice((2, 4, 8)), draw.choice((1, 2, 4)), draw.randrange(1, 5)
        samples, accumulated, many = n * groups, draw.randrange(1, 4), draw.randrange(1, 4)
        iterations = draw.randrange(1, 3)
        settings = {
            "num_generations": n, "per_device_train_batch_size": samples, "num_iterations": iterations,
            "gradient_accumulation_steps": accumulated, "steps_per_generation": accumulated * many,
            "max_steps": 12 * many * iterations, "save_steps": 3 * many * iterations,
        }  # fmt: skip
        made = migrate("GRPOConfig", settings, devices=devices)
        completions = samples * accumulated * devices  # per optimizer step
        assert made.config["data.train_batch_size"] * n == completions * many
        assert made.config[f"{A}.ppo_mini_batch_size"] * n == completions
        assert made.config["trainer.total_training_steps"] == 12
        assert made.config["trainer.save_freq"] == 3
        made.config.pop("trainer.n_gpus_per_node", None)
        load(made)


def test_groups_in_parts_are_refused():
    with pytest.raises(ConfigError, match="not a multiple of the group size 8") as caught:
        migrate("GRPOConfig", {"per_device_train_batch_size": 4}, devices=1)
    assert caught.value.expected == "a multiple of num_generations=8"
    migrate("GRPOConfig", {"per_device_train_batch_size": 4}, devices=2)


SETTINGS = """
seed: 42 | A.loss_agg_mode=token-mean A.clip_ratio_c=1000000000.0 A.policy_loss.loss_mode=vanilla
loss_type: grpo | A.loss_agg_mode=seq-mean-token-mean
loss_type: dr_grpo, scale_rewards: false | algorithm.adv_estimator=dr_grpo
loss_type: cispo, epsilon_high: 5.0 | A.policy_loss.loss_mode=cispo A.clip_ratio_low=1.0 A.clip_ratio_high=4.0
loss_type: sapo, sapo_temperature_neg: 1.5 | A.policy_loss.loss_mode=sapo A.tau_neg=1.5
loss_type: grpo, importance_sampling_level: sequence | A.policy_loss.loss_mode=gspo
delta: 4.0, epsilon_high: 0.28 | A.clip_ratio_c=4.0 A.clip_ratio_high=0.28
beta: 0.04 | A.use_kl_loss=true A.kl_loss_coef=0.04 A.kl_loss_type=low_var_kl
warmup_steps: 0.1 | A.optim.lr_warmup_steps_ratio=0.1 A.optim.lr_scheduler_type=linear
max_grad_norm: 0.0 | A.optim.clip_grad=1000000000.0
weight_decay: 0.1, adam_beta2: 0.95 | A.optim.weight_decay=0.1 A.optim.betas=[0.9, 0.95]
use_peft: true, lora_r: 8, lora_dropout: 0.0, lora_target_parameters: [experts.down_proj]
    | M.lora_rank=8 M.target_parameters=[experts.down_proj]
use_vllm: true, vllm_importance_sampling_mode: token_truncate
    | C.rollout_is=token C.rollout_is_threshold='3.0'
use_vllm: true | C.rollout_is=sequence
report_to: [wandb], eval_strategy: steps, eval_steps: 4 | trainer.test_freq=4
"""


def flow(text: str) -> dict[str, Any]:
    return yaml.safe_load(f"{{{text}}}")


@pytest.mark.parametrize(("given", "values"), rows(SETTINGS))
def test_settings_become_keys(given, values, load):
    config = load(migrate("GRPOConfig", flow(given), devices=1))
    for word in words(values):
        name, _, text = word.partition("=")
        value = value_at(config, name)
        assert (list(value) if isinstance(value, tuple) else value) == yaml.safe_load(text), name


def test_trls_defaults_that_are_others_here_are_written(load):
    config = load(migrate("GRPOConfig", {}, devices=1))
    optim = config.actor_rollout_ref.actor.optim
    assert (config.data.max_response_length, config.trainer.seed) == (512, 42)
    assert (optim.lr, optim.weight_decay, optim.lr_scheduler_type) == (1e-6, 0.0, "linear")
    assert config.actor_rollout_ref.rollout.n == 8 and not config.needs_reference
    rloo = load(migrate("RLOOConfig", {}, devices=1))
    assert rloo.algorithm.use_kl_in_reward and rloo.algorithm.kl_ctrl.kl_coef == 0.05
    assert rloo.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum"


REFUSED = """
fp16: true
loss_type: vespo
scale_rewards: batch
beta: 0.1, use_bias_correction_kl: true
lr_scheduler_type: polynomial
optim: sgd
use_peft: true, lora_dropout: 0.05
load_in_4bit: true
push_to_hub: true
no_such_field: 1
top_entropy_quantile: 0.2
beta: 0.1, sync_ref_model: true
"""


@pytest.mark.parametrize("given", rows(REFUSED))
def test_what_has_no_counterpart_is_named(given):
    """The last setting is the one that is refused."""
    made = migrate("GRPOConfig", flow(given), devices=1)
    assert [row.verdict for row in made.rows if row.name == list(flow(given))[-1]] == ["refused"]
    assert all(row.sentence for row in made.rows)


@pytest.mark.parametrize("name", list(TABLES))
def test_the_table_lists_each_given_setting_once_and_no_other(name):
    for text in ("", "beta: 0.1", "use_peft: true", "use_liger_kernel: false, seed: 1",
                 "save_strategy: epoch, eval_strategy: epoch", "warmup_ratio: 0.1, max_prompt_length: 256",
                 "use_vllm: true, vllm_importance_sampling_mode: token_mask",
                 "use_vllm: true, scale_rewards: batch"):  # fmt: skip
        rows = migrate(name, flow(text), devices=1).rows
        assert sorted(row.name for row in rows) == sorted(flow(text))


def test_a_default_that_is_not_taken_over_is_a_note():
    made = migrate("GRPOConfig", {"use_peft": True}, devices=1)
    assert any(note.startswith("lora_dropout=0.05, the default there") for note in made.lost)


EARLIER = """
GRPOConfig | warmup_ratio: 0.1 | A.optim.lr_warmup_steps_ratio=0.1
SFTConfig | warmup_ratio: 0.03 | optim.lr_warmup_steps_ratio=0.03
GRPOConfig | warmup_ratio: 0.1, warmup_steps: 7 | A.optim.lr_warmup_steps=7
GRPOConfig | max_prompt_length: 256 | data.max_prompt_length=256 data.truncation=left
SFTConfig | max_seq_length: 99 | data.max_length=99
GRPOConfig | evaluation_strategy: steps, eval_steps: 5 | trainer.test_freq=5
RLOOConfig | rloo_k: 4, kl_coef: 0.5 | algorithm.kl_ctrl.kl_coef=0.5
SFTConfig | torch_dtype: bfloat16 | fsdp_config.model_dtype=bf16
"""


@pytest.mark.parametrize(("name", "given", "values"), rows(EARLIER))
def test_names_of_earlier_versions_are_read(name, given, values, load):
    made = migrate(name, flow(given), devices=1)
    for word in words(values):
        assert made.config[word.partition("=")[0]] == yaml.safe_load(word.partition("=")[2])
    assert {row.name for row in made.rows} == set(flow(given))
    load(made)


def test_bounds_are_written_as_people_write_them(load):
    given = {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}
    made = migrate("GRPOConfig", given, devices=1)
    assert made.config["algorithm.rollout_correction.rollout_is_threshold"] == "1e-09_3.0"
    bounds = load(made).algorithm.rollout_correction.weight_bounds
    assert (bounds.lower, bounds.upper) == (1e-9, 3.0)


FILE = """
import trl
raise SystemExit("this file is never run")
N = 4
args = trl.GRPOConfig(output_dir="out", num_generations=N, beta=0.0, learning_rate=5e-6, seed=f(), **more)
trainer = trl.GRPOTrainer(model="org/name", reward_funcs=[mine, "org/rm"], args=args, train_dataset=rows)
peft = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0, bias=why)
"""


def test_a_python_file_is_read_and_never_run(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(FILE)
    given = read_python(str(path))
    assert given.name == "GRPOConfig"
    assert given.settings == {
        "output_dir": "out", "num_generations": 4, "beta": 0.0, "learning_rate": 5e-6,
        "model_name_or_path": "org/name", "reward_funcs": ["mine", "org/rm"], "lora_r": 4,
        "lora_target_modules": ["q_proj"], "lora_dropout": 0.0,
    }  # fmt: skip
    assert given.implied == {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
    assert given.unread == {"seed": "f()", "**": "more", "train_dataset": "rows", "bias": "why"}
    path.write_text("x = 1")
    with pytest.raises(ConfigError, match="creates none of TRL's configs"):
        read_python(str(path))


def test_a_command_line_is_taken_apart(tmp_path):
    (tmp_path / "c.yaml").write_text("learning_rate: 1e-5\nbeta: 0.1\n")
    line = (
        f"trl grpo --config {tmp_path}/c.yaml --use_vllm --beta=0.2 --report_to wandb tensorboard --top-k 5"
    )
    given = read_words(line.split())
    assert given.settings == {
        "learning_rate": 1e-5, "beta": 0.2, "use_vllm": True, "top_k": 5,
        "report_to": ["wandb", "tensorboard"],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="not a trainer of TRL"):
        read_words(["dpo"])
    with pytest.raises(ConfigError, match="belongs to no option"):
        read_words(["grpo", "astray"])


def test_the_command_writes_a_config(tmp_path, capsys, load):
    path = tmp_path / "train.py"
    path.write_text(FILE)
    assert main(["from-trl", str(path), "--devices", "1", "-o", str(tmp_path / "made.yaml")]) == 3
    shown = capsys.readouterr().err
    assert "completions" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["seed", "f()", "refused"] in [line[:3] for line in lines]
    assert ["train_dataset", "rows", "renamed"] in [line[:3] for line in lines]
    assert "refused" in shown and "**, bias, seed (exit status 3)" in shown
    more = words("M.path=model custom_reward_function.path=reward.py")
    assert load_train_config(str(tmp_path / "made.yaml"), more).config.actor_rollout_ref.model.lora_rank == 4
    assert main(["from-trl", "sft", "--max_length", "7"]) == 0
    assert "max_length: 7" in capsys.readouterr().out
    assert main(["from-trl", "sft", "--devices", "no"]) == 2
