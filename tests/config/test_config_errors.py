"""What is wrong is named with its key, what was given, what was expected and the remedy; all at once."""

from __future__ import annotations

import pytest

from tandem.config import load_train_config
from tandem.errors import ConfigErrors

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{R}.n=4")

# name: (overrides, field, message, expected, remedy)
WRONG = {
    "misspelt key": (
        ["data.train_batch_sise=8"],
        "data.train_batch_sise",
        "unknown key",
        None,
        "did you mean data.train_batch_size?",
    ),
    "misspelt section": (
        ["actor_rollout_ref.acotr.optim.lr=1e-6"],
        "actor_rollout_ref.acotr.optim.lr",
        "unknown key",
        None,
        f"did you mean {A}.optim.lr?",
    ),
    "right name in the wrong section": (
        ["trainer.top_p=0.9"],
        "trainer.top_p",
        "unknown key",
        None,
        f"did you mean {R}.top_p?",
    ),
    "unlike anything": (["zzz.qqq=1"], "zzz.qqq", "unknown key", None, "`tandem config show` lists all keys"),
    "a value for a section": (
        ["trainer=5"],
        "trainer",
        "a section, not a key",
        None,
        "set the keys below it: trainer.<key>=…",
    ),
    "text for an integer": (
        ["trainer.total_epochs=many"],
        "trainer.total_epochs",
        "wrong type",
        "integer >= 1",
        None,
    ),
    "fraction for an integer": (["trainer.seed=1.5"], "trainer.seed", "wrong type", "integer >= 0", None),
    "truth for an integer": (["trainer.seed=true"], "trainer.seed", "wrong type", "integer >= 0", None),
    "number for a switch": (["data.shuffle=1"], "data.shuffle", "wrong type", "true or false", None),
    "mapping for a number": (
        [f"{A}.clip_ratio={{low: 1}}"],
        f"{A}.clip_ratio",
        "wrong type",
        "number >= 0",
        None,
    ),
    "null for a number": (
        ["data.train_batch_size=null"],
        "data.train_batch_size",
        "wrong type",
        "integer >= 1",
        None,
    ),
    "number for a text": (
        ["trainer.experiment_name=12"],
        "trainer.experiment_name",
        "wrong type",
        "text",
        "to give it as text quote it twice: trainer.experiment_name='\"12\"'",
    ),
    "nan": ([f"{A}.optim.lr=.nan"], f"{A}.optim.lr", "out of range", "number >= 0", None),
    "negative size": (
        ["data.max_prompt_length=-1"],
        "data.max_prompt_length",
        "out of range",
        "integer >= 1",
        None,
    ),
    "zero temperature": ([f"{R}.temperature=0"], f"{R}.temperature", "out of range", "number > 0", None),
    "probability above one": ([f"{R}.top_p=1.5"], f"{R}.top_p", "out of range", "number > 0 and <= 1", None),
    "bad value through an inherited limit": (
        [f"{A}.clip_ratio=1.5"],
        f"{A}.clip_ratio",
        "out of range",
        "number >= 0 and <= 1",
        None,
    ),
    "beta of one": (
        [f"{A}.optim.betas=[0.9, 1.0]"],
        f"{A}.optim.betas",
        "out of range",
        "number >= 0 and < 1, 2 of them in a list",
        None,
    ),
    "one beta too few": (
        [f"{A}.optim.betas=[0.9]"],
        f"{A}.optim.betas",
        "wrong type",
        "number >= 0 and < 1, 2 of them in a list",
        None,
    ),
    "truncation": (
        ["data.truncation=eror"],
        "data.truncation",
        "unknown value",
        "one of error, left, right, middle",
        "did you mean error?",
    ),
    "estimator": (
        ["algorithm.adv_estimator=rlo"],
        "algorithm.adv_estimator",
        "unknown value",
        "one of gae, grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, or file.py:function",
        "did you mean rloo?",
    ),
    "aggregation": (
        [f"{A}.loss_agg_mode=token-maen"],
        f"{A}.loss_agg_mode",
        "unknown value",
        "one of token-mean, token-sum, seq-mean-token-sum, seq-mean-token-sum-norm, seq-mean-token-mean",
        "did you mean token-mean?",
    ),
    "policy loss": (
        [f"{A}.policy_loss.loss_mode=vanila"],
        f"{A}.policy_loss.loss_mode",
        "unknown value",
        "one of vanilla, or file.py:function",
        "did you mean vanilla?",
    ),
    "KL kind": (
        ["algorithm.kl_penalty=low_var", "algorithm.use_kl_in_reward=true"],
        "algorithm.kl_penalty",
        "unknown value",
        "one of kl, k1, abs, mse, k2, low_var_kl, k3",
        "did you mean low_var_kl?",
    ),
    "logger": (
        ["trainer.logger=[console, wnadb]"],
        "trainer.logger",
        "unknown value",
        "one of console, file, tensorboard, wandb, mlflow, swanlab, vemlp_wandb, clearml, trackio, "
        "or a list of such",
        "did you mean wandb?",
    ),
    "absent rollout engine": (
        [f"{R}.name=sglang"],
        f"{R}.name",
        "unknown value",
        "one of native, hf",
        f"this build has native and hf: set {R}.name=native",
    ),
    "absent training engine": (
        [f"{A}.strategy=megatron"],
        f"{A}.strategy",
        "unknown value",
        "one of fsdp2, fsdp",
        "this build trains with FSDP2: set strategy=fsdp2",
    ),
    "interpolation of no key": (
        ["trainer.seed=${data.sead}"],
        "trainer.seed",
        "cannot be resolved: Interpolation key 'data.sead' not found",
        None,
        None,
    ),
    "interpolation of itself": (
        ["trainer.seed=${trainer.seed}"],
        "trainer.seed",
        "cannot be resolved: Recursive interpolation detected",
        None,
        None,
    ),
    "not YAML": (
        ["trainer.logger=[console"],
        "trainer.logger",
        "the value cannot be read as YAML: while parsing a flow sequence",
        None,
        "quote a text with special characters twice: 'trainer.logger=\"…\"'",
    ),
    "no value": (["trainer.logger"], "None", "not an override", "key=value", None),
    "Hydra's deletion": (
        ["~trainer.logger="],
        "None",
        "not an override",
        "key=value",
        "to return to a key's default leave the key out",
    ),
    "mini-batch above the batch": (
        ["data.train_batch_size=64"],
        f"{A}.ppo_mini_batch_size",
        "larger than data.train_batch_size",
        "at most 64, and a divisor of it",
        f"set {A}.ppo_mini_batch_size=64, or raise data.train_batch_size",
    ),
    "mini-batch that does not divide": (
        ["data.train_batch_size=128", f"{A}.ppo_mini_batch_size=48"],
        f"{A}.ppo_mini_batch_size",
        "does not divide data.train_batch_size",
        "a divisor of 128",
        f"the nearest is {A}.ppo_mini_batch_size=32",
    ),
    "critic mini-batch": (
        ["critic.ppo_mini_batch_size=100"],
        "critic.ppo_mini_batch_size",
        "does not divide data.train_batch_size",
        "a divisor of 1024",
        "the nearest is critic.ppo_mini_batch_size=128",
    ),
    "token budget": (
        [f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=1000"],
        f"{A}.ppo_max_token_len_per_gpu",
        "holds less than one sequence of the greatest length",
        "at least 1024 tokens (data.max_prompt_length + data.max_response_length)",
        f"set {A}.ppo_max_token_len_per_gpu=1024, or shorten the sequences",
    ),
    "token budget of one phase": (
        [f"{R}.log_prob_use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=1000"],
        f"{R}.log_prob_max_token_len_per_gpu",
        "holds less than one sequence of the greatest length",
        "at least 1024 tokens (data.max_prompt_length + data.max_response_length)",
        f"set {R}.log_prob_max_token_len_per_gpu=1024, or shorten the sequences",
    ),
    "token budget of the critic": (
        ["critic.use_dynamic_bsz=true", "critic.forward_max_token_len_per_gpu=9"],
        "critic.forward_max_token_len_per_gpu",
        "holds less than one sequence of the greatest length",
        "at least 1024 tokens (data.max_prompt_length + data.max_response_length)",
        "set critic.forward_max_token_len_per_gpu=1024, or shorten the sequences",
    ),
    "devices": (
        ["trainer.n_gpus_per_node=8", "trainer.nnodes=2"],
        "trainer.n_gpus_per_node",
        "more than one process",
        "1: this build's only backend, local, runs one process",
        "set trainer.n_gpus_per_node=1 trainer.nnodes=1",
    ),
    "tensor parallel": (
        [f"{R}.tensor_model_parallel_size=2"],
        f"{R}.tensor_model_parallel_size",
        "more devices than there are",
        "1: this build's only backend, local, runs one process",
        f"set {R}.tensor_model_parallel_size=1",
    ),
    "sequence parallel": (
        [f"{A}.ulysses_sequence_parallel_size=4"],
        f"{A}.ulysses_sequence_parallel_size",
        "more devices than there are",
        "1: this build's only backend, local, runs one process",
        f"set {A}.ulysses_sequence_parallel_size=1",
    ),
    "one sample for leave-one-out": (
        ["algorithm.adv_estimator=rloo"],
        f"{R}.n",
        "rloo leaves one sample of a prompt out, and there is only one",
        ">= 2",
        f"set {R}.n=4, or another algorithm.adv_estimator",
    ),
    "option of the estimator": (
        [*GRPO, "algorithm.adv_kwargs={epsilom: 1}"],
        "algorithm.adv_kwargs.epsilom",
        "unknown option",
        "one of epsilon",
        "did you mean epsilon?",
    ),
    "option with a key of its own": (
        [*GRPO, "algorithm.adv_kwargs={norm_adv_by_std_in_grpo: false}"],
        "algorithm.adv_kwargs.norm_adv_by_std_in_grpo",
        "has a key of its own",
        None,
        "set algorithm.norm_adv_by_std_in_grpo instead",
    ),
    "option of the loss": (
        [f"{A}.policy_loss.kwargs={{tau: 1}}"],
        f"{A}.policy_loss.kwargs.tau",
        "unknown option",
        "no options",
        None,
    ),
    "sampling at temperature zero": (
        [f"{R}.val_kwargs.do_sample=true", "data.val_files=${data.train_files}"],
        f"{R}.val_kwargs.do_sample",
        "temperature 0 is greedy",
        f"a {R}.val_kwargs.temperature above 0",
        f"set {R}.val_kwargs.temperature=1.0, or {R}.val_kwargs.do_sample=false",
    ),
    "validation without data": (
        ["trainer.test_freq=5"],
        "trainer.test_freq",
        "asks for validation, and there are no validation files",
        None,
        "set data.val_files, or remove this key",
    ),
    "validation only, without data": (
        ["trainer.val_only=true"],
        "trainer.val_only",
        "asks for validation, and there are no validation files",
        None,
        "set data.val_files, or remove this key",
    ),
    "resume path missing": (
        ["trainer.resume_mode=resume_path"],
        "trainer.resume_from_path",
        "missing",
        "a checkpoint folder, for trainer.resume_mode=resume_path",
        "name one, or set trainer.resume_mode=auto",
    ),
    "resume path nowhere": (
        ["trainer.resume_mode=path", "trainer.resume_from_path=/nowhere"],
        "trainer.resume_from_path",
        "no such folder",
        "a checkpoint folder, for trainer.resume_mode=resume_path",
        "name one, or set trainer.resume_mode=auto",
    ),
    "data file": (
        ["data.train_files=[/nowhere/a.parquet]"],
        "data.train_files",
        "no such file",
        None,
        "check the path",
    ),
    "reward file": (
        ["custom_reward_function.path=/nowhere/r.py"],
        "custom_reward_function.path",
        "no such file",
        None,
        "check the path",
    ),
    "own estimator's file": (
        ["algorithm.adv_estimator=/nowhere/mine.py:mine"],
        "algorithm.adv_estimator",
        "no such file",
        None,
        "check the path before the colon",
    ),
    "model folder": (
        ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"],
        "actor_rollout_ref.model.path",
        "no such folder",
        "a Hugging Face folder with config.json",
        "check the path; a model of the Hugging Face hub must be downloaded first",
    ),
    "folder without a model": (
        ["critic.model.path=/"],
        "critic.model.path",
        "not a model folder",
        "a Hugging Face folder with config.json",
        "check the path; a model of the Hugging Face hub must be downloaded first",
    ),
}

NO_EFFECT = {
    f"{A}.kl_loss_coef=0.01": f"set only with {A}.use_kl_loss=true",
    f"{A}.kl_loss_type=k2": f"set only with {A}.use_kl_loss=true",
    "algorithm.kl_penalty=k2": "set only with algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.kl_coef=0.1": "set only with algorithm.use_kl_in_reward=true",
    "algorithm.norm_adv_by_std_in_grpo=false": (
        "set only with an algorithm.adv_estimator that takes norm_adv_by_std_in_grpo"
    ),
    f"{A}.loss_scale_factor=100": f"set only with {A}.loss_agg_mode=seq-mean-token-sum-norm",
    "custom_reward_function.name=mine": "set only with custom_reward_function.path",
    f"{A}.optim.min_lr_ratio=0.1": f"set only with {A}.optim.lr_scheduler_type=linear or cosine",
    "critic.optim.total_training_steps=9": (
        "set only with critic.optim.lr_scheduler_type=linear or cosine, "
        "or with critic.optim.lr_warmup_steps_ratio"
    ),
    "trainer.resume_from_path=/tmp": "set only with trainer.resume_mode=resume_path",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(errors, name):
    overrides, field, message, expected, remedy = WRONG[name]
    found = errors(*overrides)
    assert list(found) == [field]
    error = found[field]
    assert (error.message, error.expected, error.remedy) == (message, expected, remedy)


@pytest.mark.parametrize("override", NO_EFFECT)
def test_setting_a_result_where_it_has_no_effect_is_an_error(errors, override):
    found = errors(override)
    (error,) = found.values()
    assert error.field == override.split("=")[0]
    assert (error.message, error.expected) == ("has no effect", NO_EFFECT[override])
    assert error.remedy == "set that too, or remove this key"


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
        (f"{A}.optim.lr_scheduler_type=cosine", f"{A}.optim.min_lr_ratio=0.1"),
        (f"{A}.optim.lr=0",),
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


NOTICES = {
    "superseded sizes": (
        [f"{A}.use_dynamic_bsz=true", f"{A}.ppo_micro_batch_size_per_gpu=4"],
        [f"{A}.ppo_micro_batch_size_per_gpu: no effect; counts only with {A}.use_dynamic_bsz=false."],
    ),
    "superseded budget": (
        [f"{A}.ppo_max_token_len_per_gpu=9"],
        [f"{A}.ppo_max_token_len_per_gpu: no effect; counts only with {A}.use_dynamic_bsz=true."],
    ),
    "no critic": (
        [*GRPO, "critic.optim.lr=1e-4", "critic.ppo_epochs=2"],
        [
            "critic.optim.lr, critic.ppo_epochs: no effect; counts only with an algorithm.adv_estimator "
            "that has a critic."
        ],
    ),
    "no reference": (
        ["actor_rollout_ref.ref.fsdp_config.param_offload=true"],
        [
            "actor_rollout_ref.ref.fsdp_config.param_offload: no effect; counts only with "
            f"{A}.use_kl_loss=true or algorithm.use_kl_in_reward=true."
        ],
    ),
    "greedy validation": (
        ["data.val_files=${data.train_files}", f"{R}.val_kwargs.temperature=0.7"],
        [
            f"{R}.val_kwargs.temperature: no effect; counts only with {R}.val_kwargs.do_sample=true "
            "(without it validation is greedy)."
        ],
    ),
    "greedy validation several times": (
        ["data.val_files=${data.train_files}", f"{R}.val_kwargs.n=4"],
        [f"{R}.val_kwargs.n=4: greedy responses to one prompt are all the same; one would do."],
    ),
    "no validation": (
        ["data.val_batch_size=4", f"{R}.val_kwargs.temperature=0.7"],
        [
            f"{R}.val_kwargs.temperature, data.val_batch_size: no effect; counts only with data.val_files.",
        ],
    ),
    "group of one": (
        ["algorithm.adv_estimator=grpo"],
        [f"{R}.n=1: grpo compares the samples of a prompt, and there is only one."],
    ),
    "runner of another engine": (
        [f"{R}.name=hf", f"{R}.runner=module"],
        [f"{R}.runner: no effect; counts only with {R}.name=native."],
    ),
    "seed of no order": (
        ["data.shuffle=false", "data.seed=4"],
        ["data.seed: no effect; counts only with data.shuffle=true."],
    ),
}


@pytest.mark.parametrize("name", NOTICES)
def test_notice(load, name):
    overrides, notices = NOTICES[name]
    assert list(load(*overrides).notices) == notices


def test_everything_wrong_is_said_at_once(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {train_fils: x, shuffle: maybe}\ntrainer: {nnodes: 0}\n")
    with pytest.raises(ConfigErrors) as caught:
        load_train_config(
            str(path),
            ["broken", f"{A}.ppo_mini_batch_size=1000", "algorithm.adv_estimator=grop", f"{R}.name=vllm"],
        )
    assert [(error.field, error.message) for error in caught.value.errors] == [
        (None, "not an override"),
        ("data.train_fils", "unknown key"),
        ("data.train_files", "missing"),
        ("data.shuffle", "wrong type"),
        ("actor_rollout_ref.model.path", "missing"),
        (f"{A}.ppo_mini_batch_size", "does not divide data.train_batch_size"),
        (f"{R}.name", "unknown value"),
        ("algorithm.adv_estimator", "unknown value"),
        ("trainer.nnodes", "out of range"),
    ]
    assert str(caught.value).startswith("9 error(s) in the config\nnot an override\n  got:      broken\n")


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
        ("- a\n- b\n", "not a mapping"),
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
    assert (error.message, error.got) == ("no such config file", "nowhere.yaml")
