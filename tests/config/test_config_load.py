"""YAML files, overrides, interpolation, deprecated keys, notices, and writing a config back to YAML."""

import pickle
from pathlib import Path

import pytest

from tandem.config.load import load_train_config
from tandem.config.sources import read_sources, split_arguments, to_yaml
from tandem.config.written import to_dict
from tandem.errors import ConfigErrors
from tests.support.words import full, rows, words


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
    given = words("data.train_batch_size=128 A.ppo_epochs=2 A.ppo_epochs=4")
    config = load_train_config(str(yaml_file), given).config
    actor = config.actor_rollout_ref.actor
    assert config.data.train_batch_size == 128
    assert (actor.ppo_mini_batch_size, actor.optim.lr, actor.ppo_epochs) == (32, 3e-6, 4)


def test_interpolation_sees_the_overrides(yaml_file):
    config = load_train_config(str(yaml_file), ["data.train_batch_size=96", "trainer.project_name=p"]).config
    assert config.trainer.experiment_name == "p-96"
    assert config.trainer.default_local_dir == "runs/p/p-96"


PER_DEVICE = """
A.ppo_micro_batch_size | A.ppo_micro_batch_size_per_gpu
R.log_prob_micro_batch_size | R.log_prob_micro_batch_size_per_gpu
REF.log_prob_micro_batch_size | REF.log_prob_micro_batch_size_per_gpu
critic.ppo_micro_batch_size | critic.ppo_micro_batch_size_per_gpu
critic.forward_micro_batch_size | critic.forward_micro_batch_size_per_gpu
RM.micro_batch_size | RM.forward_micro_batch_size_per_gpu
"""


@pytest.mark.parametrize(("old", "new"), rows(PER_DEVICE))
def test_a_deprecated_micro_batch_size_is_per_device(load, loaded, old, new):
    given = f"{full(old)}=8 A.use_kl_loss=true SCORED"
    loaded(given, f"{full(new)}=8")
    notice = f"{old.strip()} is {new}=8 (8 over 1 data-parallel device) here."
    assert load(given).notices == (full(notice),)


DIVIDED = """
A.ppo_micro_batch_size | 4 | T.n_gpus_per_node=2 T.nnodes=2
A.ppo_micro_batch_size | 4 | Q={a: [2, 2], b: [3]} P={actor_rollout: a, critic: b}
R.log_prob_micro_batch_size | 4 | Q={a: [2, 2], b: [3]} P={actor_rollout: a, critic: b}
critic.ppo_micro_batch_size | 3 | Q={a: [2, 2], b: [3]} P={actor_rollout: a, critic: b}
"""


@pytest.mark.parametrize(("old", "devices", "given"), rows(DIVIDED))
def test_it_is_divided_by_the_devices_of_its_role(load, loaded, refused, old, devices, given):
    each = 24 // int(devices)
    loaded(f"{given} {old}=24", f"{old}_per_gpu={each}")
    notice = f"{old} is {old}_per_gpu={each} (24 over {devices} data-parallel devices) here."
    assert load(f"{given} {old}=24").notices == (full(notice),)
    refused(f"{given} {old}=25", f"expected: a multiple of the {devices} devices")


def test_a_deprecated_key_beside_its_replacement_is_refused(refused):
    contradiction = "contradicts A.ppo_micro_batch_size_per_gpu // remedy: remove A.ppo_micro_batch_size"
    refused("A.ppo_micro_batch_size_per_gpu=4 A.ppo_micro_batch_size=8", contradiction)


def test_yaml_of_a_config_loads_to_the_same_config_without_notices(load, tmp_path):
    config = load(
        "GRPO A.use_dynamic_bsz=true A.use_kl_loss=true A.optim.lr=2.5e-7 trainer.experiment_name='12'",
        "Q={a: [2, 1], b: 1} P={ref: b} W={actor_rollout: mine.module:Policy} trainer.cluster.address=auto",
        "trainer.timeouts.call=60 data.apply_chat_template_kwargs={enable_thinking: false}",
    ).config
    (tmp_path / "again.yaml").write_text(to_yaml(to_dict(config)))
    again = load_train_config(str(tmp_path / "again.yaml"), [])
    assert again.config == config
    assert again.notices == ()


def test_a_config_travels_between_processes_and_is_frozen(load):
    config = load("trainer.seed=3").config
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.seed = 4


def test_split_arguments():
    assert split_arguments(["run.yaml", "a=1", "b=x=y"]) == ("run.yaml", ["a=1", "b=x=y"])
    assert split_arguments(["a=1"]) == (None, ["a=1"])


def test_what_is_written_as_yaml_is_read_as_the_same_values(tmp_path):
    words = "1e5 1_000 inf nan yes null ~ : y n 1.0 2020-01-01 0x1f -1 - #c True 1e-6 .5 1:30 ü"
    more = ["", " sp ", "a: b", "two\nlines", "a word " * 40, "[a, b]", "{a: b}", "'quoted'", "!tag"]
    numbers = [1, -2, 1e-6, 1e22, 0.1, float("inf"), 12345678901234567890]
    tree = {"texts": [*words.split(), *more], "numbers": numbers, "rest": [None, True, False, {}, []]}
    tree["nested"] = {"a": {"b": 1}}
    (tmp_path / "again.yaml").write_text(to_yaml(tree))
    found, errors, *_ = read_sources(str(tmp_path / "again.yaml"), [])
    assert not errors
    assert found == tree
    assert [type(value) for value in found["numbers"]] == [type(value) for value in numbers]


def test_values_by_key_are_taken_as_they_are(required):
    """Keys may be dotted or nested, values are not parsed as YAML, and later overrides win."""
    given = {"trainer.experiment_name": "1e5", "trainer.seed": 1}
    given["algorithm"] = {"adv_kwargs": {"epsilon": 0.5}, "adv_estimator": "grpo"}
    config = load_train_config(None, [*required, given, "trainer.seed=2"]).config
    assert (config.trainer.experiment_name, config.trainer.seed) == ("1e5", 2)
    assert config.algorithm.adv_kwargs == {"epsilon": 0.5}
    with pytest.raises(ConfigErrors) as caught:
        load_train_config(None, [*required, {"trainer.sed": 1, "trainer.nnodes": "2"}])
    assert [error.field for error in caught.value.errors] == ["trainer.sed", "trainer.nnodes"]
