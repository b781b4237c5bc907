"""The config's tables, compared with the code that they describe."""

import pytest

from tandem.algorithms import aggregation, kl
from tandem.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from tandem.config import cluster, tables
from tandem.config.actor import ActorConfig
from tandem.config.schema import value_at
from tandem.observability.sinks import SINKS
from tandem.trainer.casting import CONTROLLER_POOL, PLACES, REWARD_POOL


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


def test_aggregations_and_kl_kinds():
    assert set(tables.AGGREGATIONS) == set(aggregation.AGGREGATIONS)
    assert set(tables.KL_KINDS) == set(kl.KL_KINDS)
    assert tables.FULL_KL == kl.FULL


@pytest.mark.parametrize(
    ("column", "known"),
    [("reward_components", tables.READS_COMPONENTS), ("sum_pi_squared", tables.READS_SQUARES)],
)
def test_estimators_that_read_a_column(column, known):
    assert {name for name in ADVANTAGES.names if column in ADVANTAGES.find(name).columns} == known


def test_loggers():
    assert set(tables.LOGGERS) == set(SINKS)


def test_roles_and_the_pools_of_every_run():
    assert (CONTROLLER_POOL.name, REWARD_POOL.name) == cluster.HELPER_POOLS
    assert set(cluster.ROLES) == set(PLACES)


def test_lookup():
    assert tables.needs("gae") == tables.Needs(critic=True, group=False, options=("gamma", "lam"))
    assert tables.needs("mine.py:estimator") is None
    assert tables.loss_options("vanilla") == ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    assert tables.loss_options("mine.py:loss") is None
