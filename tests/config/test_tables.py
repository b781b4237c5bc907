"""The config's tables, compared with the code that they describe, and the names of other programs."""

import pytest

from tandem.algorithms import aggregation, kl
from tandem.algorithms.corrections.registry import IMPORTANCE_WEIGHTS, REJECTIONS
from tandem.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from tandem.config import cluster, tables
from tandem.config.actor import ActorConfig
from tandem.config.other_names import OTHER_NAMES
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, unknown_key, value_at
from tandem.config.supervised import RMConfig, SFTConfig
from tandem.observability.sinks import SINKS
from tandem.trainer.casting import CONTROLLER_POOL, PLACES, REWARD_POOL
from tests.support.words import full, rows


def test_advantages():
    assert set(tables.ADVANTAGES) == set(ADVANTAGES.names)
    assert ADVANTAGES.aliases == tables.ADVANTAGE_ALIASES
    for name, needs in tables.ADVANTAGES.items():
        spec = ADVANTAGES.find(name)
        assert needs.critic == spec.needs_critic, name
        assert needs.group == ("group" in spec.columns), name
        assert set(needs.options) == set(spec.options), name


def test_policy_losses():
    assert set(tables.POLICY_LOSSES) == set(POLICY_LOSSES.names)
    assert POLICY_LOSSES.aliases == tables.POLICY_LOSS_ALIASES
    for name, options in tables.POLICY_LOSSES.items():
        assert set(options) == set(POLICY_LOSSES.find(name).options), name
    options = {option for taken in tables.POLICY_LOSSES.values() for option in taken}
    assert {*tables.LOSS_KEYS, "loss_type"} == options  # loss_type is a key of the rollout correction
    actor = ActorConfig()
    for name, taken in tables.POLICY_LOSSES.items():
        for option in set(taken) - {"loss_type"}:
            default = value_at(actor, tables.LOSS_KEYS[option])
            assert default == POLICY_LOSSES.find(name).options[option] or option == "dro_beta", option


def test_other_tables():
    assert set(tables.LOGGERS) == set(SINKS)
    assert (CONTROLLER_POOL.name, REWARD_POOL.name) == cluster.HELPER_POOLS
    assert set(cluster.ROLES) == set(PLACES)
    assert set(tables.IMPORTANCE_WEIGHTS) == set(IMPORTANCE_WEIGHTS.names)
    assert set(tables.REJECTIONS) == set(REJECTIONS.names)
    assert set(tables.RATIO_REJECTIONS) == {name for name in REJECTIONS.names if name.endswith("k1")}
    assert set(tables.AGGREGATIONS) == set(aggregation.AGGREGATIONS)
    assert set(tables.KL_KINDS) == set(kl.KL_KINDS)
    assert tables.FULL_KL == kl.FULL


def test_estimators_that_read_a_column():
    columns = {"reward_components": tables.READS_COMPONENTS, "sum_pi_squared": tables.READS_SQUARES}
    for column, known in columns.items():
        assert {name for name in ADVANTAGES.names if column in ADVANTAGES.find(name).columns} == known


def test_lookup():
    assert tables.needs("gae") == tables.Needs(critic=True, group=False, options=("gamma", "lam"))
    assert tables.needs("mine.py:estimator") is None
    assert tables.loss_options("vanilla") == ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    assert tables.loss_options("mine.py:loss") is None


MEANT = """
optim.learning_rate | A.optim.lr | optim.lr
learning_rate | A.optim.lr
learning-rate | A.optim.lr
A.optim.learning_rate | A.optim.lr
critic.optim.learning_rate | critic.optim.lr
critic_learning_rate | critic.optim.lr
warmup_ratio | A.optim.lr_warmup_steps_ratio
max_grad_norm | A.optim.clip_grad
num_generations | R.n
n_samples_per_prompt | R.n
orchestrator.rollouts_per_example | R.n
max_completion_length | data.max_response_length
generate_max_len | data.max_response_length
num_train_epochs | trainer.total_epochs
max_steps | trainer.total_training_steps
output_dir | trainer.default_local_dir
model_name_or_path | M.path | model.path
pretrain | M.path
beta | A.kl_loss_coef
epsilon_high | A.clip_ratio_high
per_device_train_batch_size | A.ppo_micro_batch_size_per_gpu | micro_batch_size_per_gpu
max_seq_length | - | data.max_length
"""


@pytest.mark.parametrize(("given", "meant", "supervised"), rows(MEANT))
def test_the_key_that_is_meant_is_named(given, meant, supervised):
    for root, key in ((TrainConfig, meant), (SFTConfig, supervised), (RMConfig, supervised)):
        if key not in ("", "-"):
            assert unknown_key(full(given), keys(root)).remedy == f"did you mean {full(key)}?"


def test_every_meaning_is_a_key_and_no_name_is():
    known = [name for root in (TrainConfig, SFTConfig, RMConfig) for name in keys(root)]
    for name, ends in OTHER_NAMES.items():
        assert all(any(key == end or key.endswith(f".{end}") for key in known) for end in ends), name
