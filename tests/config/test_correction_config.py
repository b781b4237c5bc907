"""The keys of the rollout correction: spellings, bounds, and invalid combinations."""

from __future__ import annotations

import math

import pytest

from tandem.algorithms.corrections.registry import IMPORTANCE_WEIGHTS, REJECTIONS
from tandem.config import tables
from tandem.config.load import load_train_config
from tandem.config.rollout_correction import Bounds, RolloutCorrectionConfig
from tandem.config.sources import to_yaml
from tandem.config.written import to_dict

C = "algorithm.rollout_correction"
A = "actor_rollout_ref.actor"


def test_the_tables_are_those_of_the_algorithms() -> None:
    assert set(tables.IMPORTANCE_WEIGHTS) == set(IMPORTANCE_WEIGHTS.names)
    assert set(tables.REJECTIONS) == set(REJECTIONS.names)
    assert set(tables.RATIO_REJECTIONS) == {name for name in REJECTIONS.names if name.endswith("k1")}


def test_nothing_is_corrected_unless_asked_for(load) -> None:
    correction = load().config.algorithm.rollout_correction
    assert not correction.corrects and not correction.bypass_mode
    assert correction.weight_bounds == Bounds(None, 2.0)


def test_a_command_line_of_verls(load) -> None:
    loaded = load(
        f"{C}.rollout_is=token",
        f"{C}.rollout_is_threshold=0.5_5.0",
        f"{C}.rollout_is_batch_normalize=true",
        f"{C}.rollout_rs=token_k1, seq_max_k2,seq_mean_k1,token_k1",
        f"{C}.rollout_rs_threshold=0.5_2.0,0.01,1.001",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
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


def test_the_yaml_of_a_config_loads_to_the_same(load, tmp_path) -> None:
    words = (f"{C}.rollout_is=sequence", f"{C}.rollout_is_threshold=3", f"{C}.rollout_rs=[token_k2,token_k3]")
    config = load(*words, f"{C}.rollout_rs_threshold=0.1").config
    assert config.algorithm.rollout_correction.rollout_is_threshold == "3.0"
    (tmp_path / "again.yaml").write_text(to_yaml(to_dict(config)))
    assert load_train_config(str(tmp_path / "again.yaml")).config == config


def test_one_bound_serves_all_modes() -> None:
    config = RolloutCorrectionConfig(rollout_rs="token_k2,token_k3", rollout_rs_threshold=0.3)
    assert config.rejection_bounds == (Bounds(None, 0.3), Bounds(None, 0.3))
    own = RolloutCorrectionConfig(rollout_rs="mine.py:far", rollout_rs_threshold="0.1_0.3")
    assert own.rejection_bounds == (Bounds(0.1, 0.3),)


@pytest.mark.parametrize(
    ("words", "field", "text"),
    [
        (["rollout_is=tokens"], "rollout_is", "did you mean token?"),
        (["rollout_rs=token_k4", "rollout_rs_threshold=2.0"], "rollout_rs", "did you mean token_k"),
        (["rollout_is=token", "rollout_is_threshold=5.0_0.5"], "rollout_is_threshold", "lower <= upper"),
        (["rollout_is=token", "rollout_is_threshold=-1"], "rollout_is_threshold", "above 0"),
        (["rollout_is=token", "rollout_is_threshold=high"], "rollout_is_threshold", "above 0"),
        (["rollout_is=token", "rollout_is_threshold=0.5_5"], "rollout_is_threshold", "reads 0.5_5 as 0.55"),
        (["rollout_rs=token_k1"], "rollout_rs_threshold", "one bound, or 1"),
        (
            ["rollout_rs=token_k1,token_k2", "rollout_rs_threshold='1,2,3'"],
            "rollout_rs_threshold",
            "or 2 separated",
        ),
        (
            ["rollout_rs=token_k2", "rollout_rs_threshold=0.5_2.0"],
            "rollout_rs_threshold",
            "only an upper bound",
        ),
        (["rollout_rs=token_k1", "rollout_rs_threshold=0.5"], "rollout_rs_threshold", "lower <= upper"),
        (["rollout_rs=[{}]"], "rollout_rs", "wrong type"),
        (["rollout_is_threshold=3.0"], "rollout_is_threshold", f"set only if {C}.rollout_is is set"),
        (["rollout_rs_threshold=3.0"], "rollout_rs_threshold", f"set only if {C}.rollout_rs is set"),
        (["loss_type=reinforce"], "loss_type", f"set only if {C}.bypass_mode=true"),
        (["bypass_mode=true", "rollout_is=token"], "rollout_is", f"{C}.loss_type=reinforce"),
        (
            [
                "bypass_mode=true",
                "loss_type=reinforce",
                "rollout_is=token",
                "rollout_is_batch_normalize=true",
            ],
            "rollout_is_batch_normalize",
            "a forward pass before the update",
        ),
        (["rollout_is=absent.py:weights"], "rollout_is", "does not exist"),
        (["rollout_rs=absent.py:far", "rollout_rs_threshold=1.0"], "rollout_rs", "does not exist"),
    ],
)
def test_what_is_wrong_is_said(errors, words, field, text) -> None:
    (error,) = errors(*(f"{C}.{word}" for word in words)).values()
    assert error.field == f"{C}.{field}"
    assert text in str(error)


def test_the_loss_of_bypass_mode_and_the_mode_come_together(load, errors) -> None:
    loss = f"{A}.policy_loss.loss_mode"
    for words in ((f"{C}.bypass_mode=true",), (f"{C}.bypass_mode=true", f"{loss}=bypass_mode")):
        assert load(*words).notices == ()
    (error,) = errors(f"{loss}=bypass_mode").values()
    assert error.field == loss and f"{C}.bypass_mode=true" in str(error.remedy)
    (error,) = errors(f"{C}.bypass_mode=true", f"{loss}=mine.module:loss").values()
    assert error.field == loss and "its own policy loss" in error.message
    words = (f"{C}.bypass_mode=true", f"{loss}=bypass_mode")
    (error,) = errors(*words, f"{A}.policy_loss.kwargs={{loss_type: reinforce}}").values()
    assert f"set {C}.loss_type instead" in str(error)


def test_reinforce_has_no_clip_range(load, errors) -> None:
    on = f"{C}.bypass_mode=true"
    assert load(on, f"{A}.clip_ratio=0.3").notices == ()
    (error, *_) = errors(on, f"{C}.loss_type=reinforce", f"{A}.clip_ratio_c=4.0").values()
    assert error.field == f"{A}.clip_ratio_c" and error.message == "has no effect"


@pytest.mark.parametrize(
    ("old", "now", "value"),
    [
        (f"{C}.use_policy_gradient=true", "loss_type", "reinforce"),
        (f"{C}.bypass_old_logprob_for_rollout=true", "bypass_mode", True),
    ],
)
def test_older_spellings_work_with_a_sentence(load, old, now, value) -> None:
    loaded = load(old)
    assert getattr(loaded.config.algorithm.rollout_correction, now) == value
    assert any(" here." in notice and f"{C}.{now}" in notice for notice in loaded.notices)


def test_the_first_form_of_the_correction_is_refused_at_its_switch(load, errors) -> None:
    words = ("algorithm.rollout_is_level=sequence", "algorithm.rollout_is_threshold=4.0")
    assert load(*words, "algorithm.rollout_is=False").config == load(*words).config == load().config
    assert errors(*words, "algorithm.rollout_is=True").keys() == {"algorithm.rollout_is"}
