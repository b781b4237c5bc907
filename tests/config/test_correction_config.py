"""The keys of the rollout correction: spellings and bounds."""

import math

import pytest

from tandem.algorithms.corrections.registry import IMPORTANCE_WEIGHTS, REJECTIONS
from tandem.config import tables
from tandem.config.load import load_train_config
from tandem.config.rollout_correction import Bounds, RolloutCorrectionConfig
from tandem.config.sources import to_yaml
from tandem.config.written import to_dict


def test_the_tables_are_those_of_the_algorithms():
    assert set(tables.IMPORTANCE_WEIGHTS) == set(IMPORTANCE_WEIGHTS.names)
    assert set(tables.REJECTIONS) == set(REJECTIONS.names)
    assert set(tables.RATIO_REJECTIONS) == {name for name in REJECTIONS.names if name.endswith("k1")}


def test_a_command_line_of_verls(load):
    loaded = load(
        "C.rollout_is=token C.rollout_is_threshold=0.5_5.0 C.rollout_is_batch_normalize=true",
        "C.rollout_rs=token_k1, seq_max_k2,seq_mean_k1,token_k1 C.rollout_rs_threshold=0.5_2.0,0.01,1.001",
        "R.calculate_log_probs=true",
    )
    correction = loaded.config.algorithm.rollout_correction
    assert correction.corrects
    assert correction.weight_bounds == Bounds(0.5, 5.0)
    assert correction.rollout_rs == ("token_k1", "seq_max_k2", "seq_mean_k1")
    one, two, three = correction.rejection_bounds
    assert (one, two) == (Bounds(math.log(0.5), math.log(2)), Bounds(None, 0.01))
    assert (three.lower, three.upper) == pytest.approx((-math.log(1.001), math.log(1.001)))
    (notice,) = loaded.notices
    assert "calculate_log_probs: ignored" in notice


def test_the_yaml_of_a_config_loads_to_the_same(load, tmp_path):
    given = "C.rollout_is=sequence C.rollout_is_threshold=3 C.rollout_rs=[token_k2,token_k3]"
    config = load(f"{given} C.rollout_rs_threshold=0.1").config
    assert config.algorithm.rollout_correction.rollout_is_threshold == "3.0"
    (tmp_path / "again.yaml").write_text(to_yaml(to_dict(config)))
    assert load_train_config(str(tmp_path / "again.yaml")).config == config


def test_one_bound_serves_all_modes(load):
    assert load().config.algorithm.rollout_correction.weight_bounds == Bounds(None, 2.0)
    config = RolloutCorrectionConfig(rollout_rs="token_k2,token_k3", rollout_rs_threshold=0.3)
    assert config.rejection_bounds == (Bounds(None, 0.3), Bounds(None, 0.3))
    own = RolloutCorrectionConfig(rollout_rs="mine.py:far", rollout_rs_threshold="0.1_0.3")
    assert own.rejection_bounds == (Bounds(0.1, 0.3),)


def test_older_spellings(load, loaded):
    loaded("C.use_policy_gradient=true", "C.loss_type=reinforce")
    loaded("C.bypass_old_logprob_for_rollout=true", "C.bypass_mode=true")
    first = "algorithm.rollout_is_level=sequence algorithm.rollout_is_threshold=4.0"
    assert load(f"{first} algorithm.rollout_is=False").config == load(first).config == load().config
