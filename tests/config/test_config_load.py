"""YAML files, overrides, interpolation, deprecated keys, notices, and writing a config back to YAML."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tandem.config.load import load_sft_config, load_train_config
from tandem.config.schema import value_at
from tandem.config.sources import read_sources, split_arguments, to_yaml
from tandem.config.written import to_dict
from tandem.errors import ConfigError, ConfigErrors

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REWARD_MODEL = ("reward_model.enable=true", "reward_model.model.path=${actor_rollout_ref.model.path}")


@pytest.fixture
def yaml_file(tmp_path: Path, train_file: str, model: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
data:
  train_files: [{train_file}]
  train_batch_size: 64
  apply_chat_template_kwargs: {{enable_thinking: false}}
actor_rollout_ref:
  model: {{path: {model}}}
  actor: {{ppo_mini_batch_size: 32, optim: {{lr: 3e-6}}}}
critic:
trainer:
  experiment_name: ${{trainer.project_name}}-${{data.train_batch_size}}
  logger: [console, tensorboard]
"""
    )
    return path


def test_overrides_win_over_the_file_and_the_last_override_wins(yaml_file):
    loaded = load_train_config(
        str(yaml_file), ["data.train_batch_size=128", f"{A}.ppo_epochs=2", f"{A}.ppo_epochs=4"]
    )
    actor = loaded.config.actor_rollout_ref.actor
    assert loaded.config.data.train_batch_size == 128
    assert (actor.ppo_mini_batch_size, actor.optim.lr, actor.ppo_epochs) == (32, 3e-6, 4)
    assert loaded.notices == (
        f"{A}.ppo_epochs is given more than once on the command line; the last value is used.",
    )


def test_interpolation_sees_the_overrides(yaml_file):
    config = load_train_config(str(yaml_file), ["data.train_batch_size=96", "trainer.project_name=p"]).config
    assert config.trainer.experiment_name == "p-96"
    assert config.trainer.default_local_dir == "runs/p/p-96"


def test_lists_and_nested_values_in_yaml_form(load, tmp_path):
    (tmp_path / "b.parquet").touch()
    two = f"[{tmp_path / 'train.parquet'}, {tmp_path / 'b.parquet'}]"
    config = load(
        f"data.train_files={two}",
        'trainer.logger=["console","tensorboard"]',
        f"{R}.stop=['</answer>', \"\\n\\n\"]",
        "algorithm.adv_estimator=grpo",
        f"{R}.n=4",
        "algorithm.adv_kwargs={epsilon: 1e-4}",
        f"{A}.optim.betas=[0.9, 0.95]",
    ).config
    assert config.data.train_files == (str(tmp_path / "train.parquet"), str(tmp_path / "b.parquet"))
    assert config.trainer.logger == ("console", "tensorboard")
    assert config.actor_rollout_ref.rollout.stop == ("</answer>", "\n\n")
    assert config.algorithm.adv_kwargs == {"epsilon": 1e-4}
    assert config.actor_rollout_ref.actor.optim.betas == (0.9, 0.95)


def test_one_text_stands_for_a_list_of_one(load, train_file):
    config = load("trainer.logger=console", f"data.val_files={train_file}", f"{R}.stop=END").config
    assert config.trainer.logger == ("console",)
    assert config.data.val_files == (train_file,)
    assert config.actor_rollout_ref.rollout.stop == ("END",)


def test_home_folder_is_expanded(load, train_file, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(train_file).parent))
    assert load("data.val_files=~/train.parquet").config.data.val_files == (train_file,)


def test_hydra_prefixes_are_accepted_with_a_notice(load):
    loaded = load("+trainer.seed=3", "++data.shuffle=false")
    assert loaded.config.trainer.seed == 3
    assert not loaded.config.data.shuffle
    assert loaded.notices == (
        "+trainer.seed: the prefix + is not needed; the key is read as trainer.seed.",
        "++data.shuffle: the prefix ++ is not needed; the key is read as data.shuffle.",
    )


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        (f"{A}.strategy=fsdp", f"{A}.strategy", "fsdp2"),
        ("critic.strategy=fsdp", "critic.strategy", "fsdp2"),
        (f"{A}.fsdp_config.dtype=bfloat16", f"{A}.fsdp_config.dtype", "bf16"),
        (f"{A}.fsdp_config.model_dtype=float64", f"{A}.fsdp_config.model_dtype", "fp64"),
    ],
)
def test_aliases_become_the_name(load, alias, name, value):
    node = to_dict(load(alias).config)
    for part in name.split("."):
        node = node[part]
    assert node == value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{A}.ppo_micro_batch_size", f"{A}.ppo_micro_batch_size_per_gpu"),
        (f"{R}.log_prob_micro_batch_size", f"{R}.log_prob_micro_batch_size_per_gpu"),
        (
            "actor_rollout_ref.ref.log_prob_micro_batch_size",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        ),
        ("critic.ppo_micro_batch_size", "critic.ppo_micro_batch_size_per_gpu"),
        ("critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu"),
        ("reward_model.micro_batch_size", "reward_model.forward_micro_batch_size_per_gpu"),
    ],
)
def test_deprecated_micro_batch_size_is_per_device(load, old, new):
    loaded = load(f"{old}=8", f"{A}.use_kl_loss=true", *REWARD_MODEL)
    node = to_dict(loaded.config)
    for part in new.split("."):
        node = node[part]
    assert node == 8
    assert loaded.notices == (f"{old} is {new}=8 (8 over 1 data-parallel device) here.",)


POOLS = ("trainer.resource_pools={a: [2, 2], b: [3]}", "trainer.placement={actor_rollout: a, critic: b}")


@pytest.mark.parametrize(
    ("overrides", "old", "devices"),
    [
        (("trainer.n_gpus_per_node=2", "trainer.nnodes=2"), f"{A}.ppo_micro_batch_size", 4),
        (POOLS, f"{A}.ppo_micro_batch_size", 4),
        (POOLS, f"{R}.log_prob_micro_batch_size", 4),
        (POOLS, "critic.ppo_micro_batch_size", 3),
    ],
)
def test_deprecated_micro_batch_size_is_divided_by_the_devices_of_its_role(
    load, errors, overrides, old, devices
):
    loaded = load(f"{old}=24", *overrides)
    assert value_at(loaded.config, f"{old}_per_gpu") == 24 // devices
    assert loaded.notices == (
        f"{old} is {old}_per_gpu={24 // devices} (24 over {devices} data-parallel devices) here.",
    )
    (error,) = errors(f"{old}=25", *overrides).values()
    assert (error.field, error.got, error.expected) == (old, 25, f"a multiple of the {devices} devices")


def test_deprecated_micro_batch_size_beside_a_wrong_number_of_devices(errors):
    wrong = ("trainer.n_gpus_per_node=many", "trainer.placement.critic=nowhere")
    assert set(errors("critic.ppo_micro_batch_size=5", *wrong[:1])) == {"trainer.n_gpus_per_node"}
    assert set(errors("critic.ppo_micro_batch_size=5", *wrong[1:])) == {"trainer.placement.critic"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("reward_model.micro_batch_size_per_gpu", "reward_model.forward_micro_batch_size_per_gpu"),
        ("trainer.ray_wait_register_center_timeout", "trainer.timeouts.start"),
    ],
)
def test_deprecated_name(load, old, new):
    loaded = load(f"{old}=8", "trainer.n_gpus_per_node=2", *REWARD_MODEL)
    assert value_at(loaded.config, new) == 8
    assert loaded.notices == (f"{old} is {new}=8 here.",)


def test_deprecated_key_beside_its_replacement_is_an_error(errors):
    found = errors(f"{A}.ppo_micro_batch_size=8", f"{A}.ppo_micro_batch_size_per_gpu=4")
    assert str(found[f"{A}.ppo_micro_batch_size"]) == (
        f"{A}.ppo_micro_batch_size: this contradicts {A}.ppo_micro_batch_size_per_gpu\n"
        f"  got:      8\n  remedy:   remove {A}.ppo_micro_batch_size"
    )


@pytest.mark.parametrize("role", [A, "critic"])
def test_deprecated_grad_clip(load, role):
    loaded = load(f"{role}.grad_clip=0.5")
    policy = loaded.config.actor_rollout_ref.actor
    assert (policy if role == A else loaded.config.critic).optim.clip_grad == 0.5
    assert loaded.notices == (f"{role}.grad_clip is {role}.optim.clip_grad=0.5 here.",)


def test_deprecated_key_given_as_null_is_silent(load):
    assert load(f"{A}.ppo_micro_batch_size=null").notices == ()


def test_yaml_of_a_config_loads_to_the_same_config_without_notices(load, tmp_path):
    config = load(
        "algorithm.adv_estimator=grpo",
        f"{R}.n=4",
        f"{A}.use_dynamic_bsz=true",
        f"{A}.use_kl_loss=true",
        f"{A}.optim.lr=2.5e-7",
        "trainer.experiment_name='12'",
        "trainer.resource_pools={a: [2, 1], b: 1}",
        "trainer.placement={ref: b}",
        "trainer.worker_classes={actor_rollout: mine.module:Policy}",
        "trainer.cluster.address=auto",
        "trainer.timeouts.call=60",
        "data.apply_chat_template_kwargs={enable_thinking: false}",
    ).config
    (tmp_path / "again.yaml").write_text(to_yaml(to_dict(config)))
    again = load_train_config(str(tmp_path / "again.yaml"), [])
    assert again.config == config
    assert again.notices == ()


def test_a_config_travels_between_processes(load):
    config = load("trainer.seed=3").config
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_config_is_frozen(load):
    with pytest.raises(ValueError, match="frozen"):
        load().config.trainer.seed = 3


def test_sft_config(train_file, model):
    loaded = load_sft_config(
        None, [f"data.train_files={train_file}", f"model.path={model}", "trainer.seed=5"]
    )
    config = loaded.config
    assert (config.data.train_batch_size, config.data.max_length, config.data.seed) == (256, 1024, 5)
    assert (config.optim.lr, config.trainer.total_epochs, config.model.tokenizer_path) == (1e-5, 1, model)
    assert config.train_batching.max_tokens == 16384
    assert loaded.notices == ()


def test_sft_config_refuses_what_only_reinforcement_has(train_file, model):
    with pytest.raises(ConfigErrors) as caught:
        load_sft_config(
            None,
            [
                f"data.train_files={train_file}",
                f"model.path={model}",
                "trainer.critic_warmup=3",
                "max_token_len_per_gpu=1000",
                "trainer.test_freq=5",
                "optim.min_lr_ratio=0.1",
            ],
        )
    assert [error.field for error in caught.value.errors] == [
        "trainer.critic_warmup",
        "optim.min_lr_ratio",
        "max_token_len_per_gpu",
        "trainer.test_freq",
    ]


def test_split_arguments():
    assert split_arguments(["run.yaml", "a=1", "b=x=y"]) == ("run.yaml", ["a=1", "b=x=y"])
    assert split_arguments(["a=1"]) == (None, ["a=1"])
    with pytest.raises(ConfigError, match="neither an override"):
        split_arguments(["run.yaml", "a=1", "other.yaml"])
    with pytest.raises(ConfigError, match="unknown option"):
        split_arguments(["--dry"])


def test_what_is_written_as_yaml_is_read_as_the_same_values(tmp_path):
    words = "1e5 1_000 inf nan yes null ~ : y n 1.0 2020-01-01 0x1f -1 - #c True 1e-6 .5 1:30 ü"
    more = ["", " sp ", "a: b", "two\nlines", "a word " * 40, "[a, b]", "{a: b}", "'quoted'", "!tag"]
    numbers = [1, -2, 1e-6, 1e22, 0.1, float("inf"), 12345678901234567890]
    tree = {
        "texts": [*words.split(), *more],
        "numbers": numbers,
        "rest": [None, True, False, {}, []],
        "nested": {"a": {"b": 1}},
    }
    (tmp_path / "again.yaml").write_text(to_yaml(tree))
    found, errors, *_ = read_sources(str(tmp_path / "again.yaml"), [])
    assert not errors
    assert found == tree
    assert [type(value) for value in found["numbers"]] == [type(value) for value in numbers]


def test_values_by_key_are_taken_as_they_are(required: list[str]) -> None:
    """Keys may be dotted or nested, values are not parsed as YAML, and later overrides win."""
    given = {
        "trainer.experiment_name": "1e5",
        "algorithm": {"adv_kwargs": {"epsilon": 0.5}, "adv_estimator": "grpo"},
        "trainer.seed": 1,
    }
    config = load_train_config(None, [*required, given, "trainer.seed=2"]).config
    assert (config.trainer.experiment_name, config.trainer.seed) == ("1e5", 2)
    assert config.algorithm.adv_kwargs == {"epsilon": 0.5}
    with pytest.raises(ConfigErrors) as caught:
        load_train_config(None, [*required, {"trainer.sed": 1, "trainer.nnodes": "2"}])
    assert [error.field for error in caught.value.errors] == ["trainer.sed", "trainer.nnodes"]
