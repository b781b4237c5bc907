"""All errors are reported at once, each fault once; also for unreadable files."""

from __future__ import annotations

import pytest

from tandem.config.load import load_train_config
from tandem.errors import ConfigErrors

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_everything_wrong_is_said_at_once(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {train_fils: x, shuffle: maybe}\ntrainer: {nnodes: 0}\n")
    with pytest.raises(ConfigErrors) as caught:
        load_train_config(
            str(path),
            ["broken", f"{A}.ppo_mini_batch_size=1000", "algorithm.adv_estimator=grop", f"{R}.name=vlm"],
        )
    assert [(error.field, error.message) for error in caught.value.errors] == [
        (None, "this is not an override"),
        ("data.train_fils", "unknown key"),
        ("data.train_files", "missing"),
        ("data.shuffle", "wrong type"),
        ("actor_rollout_ref.model.path", "missing"),
        (f"{A}.ppo_mini_batch_size", "does not divide data.train_batch_size"),
        (f"{R}.name", "unknown value"),
        ("algorithm.adv_estimator", "unknown value"),
        ("trainer.nnodes", "out of range"),
    ]
    assert str(caught.value).startswith(
        "9 error(s) in the config\nthis is not an override\n  got:      broken\n"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.train_batch_size=lots", f"{A}.ppo_mini_batch_size=48"),
        (f"{A}.use_dynamic_bsz=perhaps",),
        ("algorithm.adv_estimator=grop", "algorithm.norm_adv_by_std_in_grpo=false", f"{R}.n=4"),
        ("algorithm.adv_estimator=rlo",),
        (
            f"{A}.ppo_max_token_len_per_gpu=0",
            f"{R}.log_prob_use_dynamic_bsz=true",
            "data.max_response_length=30000",
        ),
    ],
)
def test_one_wrong_value_is_reported_once_and_drags_no_others_along(errors, overrides):
    assert list(errors(*overrides)) == [overrides[0].split("=")[0]]


def test_a_budget_of_exactly_one_sequence_will_do(load):
    load(f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=1024")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "cannot be read as YAML"),
        ("- a\n- b\n", "the file is not a mapping"),
        ("a: 1\na: 2\n", "cannot be read as YAML"),
    ],
)
def test_unreadable_file(tmp_path, required, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        load_train_config(str(path), required)
    (error,) = caught.value.errors
    assert (error.field, error.message) == (str(path), message)


def test_missing_file(required):
    with pytest.raises(ConfigErrors) as caught:
        load_train_config("nowhere.yaml", required)
    (error,) = caught.value.errors
    assert (error.message, error.got) == ("this config file does not exist", "nowhere.yaml")
