"""A key that would change results but has no effect is an error; valid combinations give no message."""

from __future__ import annotations

import pytest

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{R}.n=4")


NO_EFFECT = {
    f"{A}.kl_loss_coef=0.01": f"set only if {A}.use_kl_loss=true",
    f"{A}.kl_loss_type=k2": f"set only if {A}.use_kl_loss=true",
    "algorithm.kl_penalty=k2": "set only if algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.kl_coef=0.1": "set only if algorithm.use_kl_in_reward=true",
    "algorithm.norm_adv_by_std_in_grpo=false": (
        "set only if algorithm.adv_estimator takes norm_adv_by_std_in_grpo"
    ),
    "algorithm.gdpo_reward_weights=[1, 2]": ("set only if algorithm.adv_estimator takes gdpo_reward_weights"),
    f"{A}.loss_scale_factor=100": f"set only if {A}.loss_agg_mode=seq-mean-token-sum-norm",
    "custom_reward_function.name=mine": "set only if custom_reward_function.path is set",
    f"{A}.optim.min_lr_ratio=0.1": f"set only if {A}.optim.lr_scheduler_type=linear, cosine or wsd",
    f"{A}.optim.muon_momentum=0.9": f"set only if {A}.optim.optimizer=muon",
    "critic.optim.lr_wsd_decay_ratio=0.2": "set only if critic.optim.lr_scheduler_type=wsd",
    f"{A}.optim.lr_wsd_decay_style=linear": f"set only if {A}.optim.lr_scheduler_type=wsd",
    "critic.optim.total_training_steps=9": (
        "set only if critic.optim.lr_scheduler_type=linear, cosine or wsd, "
        "or if critic.optim.lr_warmup_steps_ratio is above 0"
    ),
    "trainer.keep_best_mode=min": "set only if trainer.keep_best is set",
    "trainer.resume_from_path=/tmp": "set only if trainer.resume_mode=resume_path",
}


@pytest.mark.parametrize("override", NO_EFFECT)
def test_setting_a_result_where_it_has_no_effect_is_an_error(errors, override):
    found = errors(override)
    (error,) = found.values()
    assert error.field == override.split("=")[0]
    assert (error.message, error.expected) == ("has no effect", NO_EFFECT[override])
    assert error.remedy.endswith("remove this key")


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{A}.use_kl_loss=false", f"{A}.kl_loss_coef=0.0"),
        (f"{A}.kl_loss_coef=0.001",),
        ("algorithm.kl_ctrl.kl_coef=0.0",),
        (f"{A}.use_kl_loss=true", f"{A}.kl_loss_coef=0.5", f"{A}.kl_loss_type=k2"),
        ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=abs", "algorithm.kl_ctrl.kl_coef=0.2"),
        (f"{A}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"),
        (*GRPO, "algorithm.norm_adv_by_std_in_grpo=false"),
        ("algorithm.adv_estimator=gdpo", f"{R}.n=4", "algorithm.gdpo_reward_weights=[1, 0.5]"),
        ("algorithm.adv_estimator=grpo_vectorized", f"{R}.n=4", "algorithm.norm_adv_by_std_in_grpo=false"),
        ("algorithm.adv_estimator=vtrace", "algorithm.gamma=0.9", "algorithm.adv_kwargs={rho_bar: 2}"),
        (f"{A}.optim.lr_scheduler_type=cosine", f"{A}.optim.min_lr_ratio=0.1"),
        (f"{A}.optim.lr=0",),
        (f"{A}.optim.optimizer=muon", f"{A}.optim.muon_momentum=0.9", f"{A}.optim.no_weight_decay=[]"),
        ("critic.optim.optimizer=AdamW", "critic.optim.fused=false", "critic.optim.no_weight_decay=bias"),
        (f"{A}.optim.lr_scheduler_type=wsd", f"{A}.optim.lr_wsd_decay_style=linear"),
        ("critic.loss_agg_mode=seq-mean-token-sum-norm", f"{A}.loss_scale_factor=100"),
        ("algorithm.adv_estimator=my_package.module:estimator", "algorithm.adv_kwargs={anything: 1}"),
    ],
)
def test_right_combinations_pass_without_a_word(load, overrides):
    assert load(*overrides).notices == ()


def test_adaptive_control_reads_its_target_and_horizon(load, errors):
    on = "algorithm.use_kl_in_reward=true"
    keys = ("algorithm.kl_ctrl.horizon=500", "algorithm.kl_ctrl.target_kl=0.5")
    control = load(on, "algorithm.kl_ctrl.type=adaptive", *keys).config.algorithm.kl_ctrl
    assert (control.horizon, control.target_kl) == (500, 0.5)
    assert set(errors(on, *keys)) == {"algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"}
    found = errors(on, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=0")
    assert found["algorithm.kl_ctrl.horizon"].expected == "integer > 0"


def test_the_best_by_a_validation_needs_one(errors):
    (error,) = errors("trainer.keep_best=val/accuracy").values()
    assert error.field == "trainer.keep_best" and error.got == "val/accuracy"
    assert "never validates" in error.message and "trainer.test_freq" in error.remedy
