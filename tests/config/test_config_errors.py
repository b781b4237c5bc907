"""An error names its key, the given value, the expected value and the remedy; all are reported at once."""

from __future__ import annotations

import pytest

from tandem import hub
from tandem.config.tables import ADVANTAGE_ALIASES, ADVANTAGES, ROLLOUT_ENGINES

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SCORED = ("reward_model.enable=true", "reward_model.model.path=${actor_rollout_ref.model.path}")
GRPO = ("algorithm.adv_estimator=grpo", f"{R}.n=4")

# name: (overrides, field, part of the message, part of expected, part of the remedy)
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
    "unlike anything": (["zzz.qqq=1"], "zzz.qqq", "unknown key", None, "`tandem config show`"),
    "a value for a section": (
        ["trainer=5"],
        "trainer",
        "section, not a key",
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
        "trainer.experiment_name='\"12\"'",
    ),
    "nan as a text": ([f"{A}.optim.lr=nan"], f"{A}.optim.lr", "out of range", "number >= 0", None),
    "infinity as a text": ([f"{A}.optim.eps=-inf"], f"{A}.optim.eps", "out of range", "number > 0", None),
    "nan for an integer": (["trainer.seed=NaN"], "trainer.seed", "out of range", "integer >= 0", None),
    "nan in a list": (
        [f"{A}.optim.betas=[0.9, nan]"],
        f"{A}.optim.betas",
        "out of range",
        "number >= 0 and < 1, as a list of 2",
        None,
    ),
    "nan among names": (
        [f"{A}.optim.lr_scheduler_type=nan"],
        f"{A}.optim.lr_scheduler_type",
        "unknown value",
        "one of constant, linear, cosine, wsd",
        "did you mean constant?",
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
        "never falls below 0",
        f"0 to 1 with {A}.policy_loss.loss_mode=vanilla",
        f"set {A}.clip_ratio_low=1",
    ),
    "beta of one": (
        [f"{A}.optim.betas=[0.9, 1.0]"],
        f"{A}.optim.betas",
        "out of range",
        "number >= 0 and < 1, as a list of 2",
        None,
    ),
    "one beta too few": (
        [f"{A}.optim.betas=[0.9]"],
        f"{A}.optim.betas",
        "wrong type",
        "number >= 0 and < 1, as a list of 2",
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
        f"one of {', '.join([*ADVANTAGES, *ADVANTAGE_ALIASES])}, or file.py:function",
        "did you mean rloo?",
    ),
    "aggregation": (
        [f"{A}.loss_agg_mode=token-maen"],
        f"{A}.loss_agg_mode",
        "unknown value",
        "one of token-mean, token-sum, seq-mean-token-sum, seq-mean-token-sum-norm, seq-mean-token-mean, "
        "or null",
        "did you mean token-mean?",
    ),
    "policy loss": (
        [f"{A}.policy_loss.loss_mode=vanila"],
        f"{A}.policy_loss.loss_mode",
        "unknown value",
        "one of bypass_mode, cispo, clip_cov, dppo_kl, dppo_tv, dro, geo_mean, gpg, gspo, kl_cov, reinforce, "
        "sapo, vanilla, gmpo, or file.py:function",
        "did you mean vanilla?",
    ),
    "KL kind": (
        ["algorithm.kl_penalty=low_var", "algorithm.use_kl_in_reward=true"],
        "algorithm.kl_penalty",
        "unknown value",
        "one of kl, kl+, k1, k1+, abs, abs+, mse, mse+, k2, k2+, low_var_kl, low_var_kl+, k3, k3+, full, or "
        "file.py:function",
        "did you mean low_var_kl?",
    ),
    "logger": (
        ["trainer.logger=[console, wnadb]"],
        "trainer.logger",
        "unknown value",
        "one of console, file, tensorboard, wandb, mlflow, swanlab, vemlp_wandb, clearml, trackio, "
        "or a list of them",
        "did you mean wandb?",
    ),
    "rollout engine": (
        [f"{R}.name=natve"],
        f"{R}.name",
        "unknown value",
        f"one of {', '.join(ROLLOUT_ENGINES)}",
        "did you mean native?",
    ),
    "absent training engine": (
        [f"{A}.strategy=torchtitan"],
        f"{A}.strategy",
        "unknown value",
        "one of fsdp2, fsdp",
        None,
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
        "'trainer.logger=\"…\"'",
    ),
    "no value": (["trainer.logger"], "None", "not an override", "key=value", None),
    "mini-batch above the batch": (
        ["data.train_batch_size=64", f"{A}.ppo_mini_batch_size=65"],
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
        f"{A}.ppo_mini_batch_size=32",
    ),
    "critic mini-batch": (
        ["critic.ppo_mini_batch_size=100"],
        "critic.ppo_mini_batch_size",
        "does not divide data.train_batch_size",
        "a divisor of 1024",
        "critic.ppo_mini_batch_size=128",
    ),
    "token budget": (
        [f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=1000"],
        f"{A}.ppo_max_token_len_per_gpu",
        "too small for the longest sequence",
        "at least 1024 tokens (data.max_prompt_length + data.max_response_length)",
        f"set {A}.ppo_max_token_len_per_gpu=1024",
    ),
    "token budget of one phase": (
        [f"{R}.log_prob_use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=1000"],
        f"{R}.log_prob_max_token_len_per_gpu",
        "too small for the longest sequence",
        "at least 1024 tokens (data.max_prompt_length + data.max_response_length)",
        f"set {R}.log_prob_max_token_len_per_gpu=1024",
    ),
    "token budget of the critic": (
        ["critic.use_dynamic_bsz=true", "critic.forward_max_token_len_per_gpu=9"],
        "critic.forward_max_token_len_per_gpu",
        "too small for the longest sequence",
        "at least 1024 tokens (data.max_prompt_length + data.max_response_length)",
        "set critic.forward_max_token_len_per_gpu=1024",
    ),
    "tensor parallel": (
        [f"{R}.tensor_model_parallel_size=2"],
        f"{R}.tensor_model_parallel_size",
        "devices of the rollout",
        "a divisor of 1",
        f"set {R}.tensor_model_parallel_size=1, or change the number of devices",
    ),
    "tensor parallel of another engine": (
        [f"{R}.tensor_model_parallel_size=2", f"{R}.name=hf", "trainer.n_gpus_per_node=2"],
        f"{R}.tensor_model_parallel_size",
        "rollout.name=hf keeps each layer on one device",
        "1",
        f"set {R}.tensor_model_parallel_size=1, or actor_rollout_ref.rollout.name=native",
    ),
    "reward model without a folder": (
        ["reward_model.enable=true"],
        "reward_model.model.path",
        "missing",
        "a Hugging Face folder of a sequence classifier with one label",
        "add reward_model.model.path=…, or set reward_model.enable=false",
    ),
    "reward model's folder": (
        ["reward_model.enable=true", "reward_model.model.path=/nowhere"],
        "reward_model.model.path",
        "does not exist",
        "a Hugging Face folder with config.json",
        "OWNER/NAME",
    ),
    "token budget of the reward model": (
        [
            "reward_model.enable=true",
            "reward_model.model.path=${actor_rollout_ref.model.path}",
            "reward_model.use_dynamic_bsz=true",
            "reward_model.forward_max_token_len_per_gpu=1023",
        ],
        "reward_model.forward_max_token_len_per_gpu",
        "too small for the longest sequence",
        "at least 1024 tokens (data.max_prompt_length + data.max_response_length)",
        "set reward_model.forward_max_token_len_per_gpu=1024",
    ),
    "one sample for leave-one-out": (
        ["algorithm.adv_estimator=rloo"],
        f"{R}.n",
        "only one",
        ">= 2",
        f"set {R}.n=4, or use a different algorithm.adv_estimator",
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
        "has its own key",
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
        "greedy",
        f"a {R}.val_kwargs.temperature above 0",
        f"set {R}.val_kwargs.temperature=1.0, or {R}.val_kwargs.do_sample=false",
    ),
    "validation without data": (
        ["trainer.test_freq=5"],
        "trainer.test_freq",
        "no validation files",
        None,
        "set data.val_files, or remove this key",
    ),
    "validation only, without data": (
        ["trainer.val_only=true"],
        "trainer.val_only",
        "no validation files",
        None,
        "set data.val_files, or remove this key",
    ),
    "resume path missing": (
        ["trainer.resume_mode=resume_path"],
        "trainer.resume_from_path",
        "missing",
        "a checkpoint folder",
        "set trainer.resume_mode=auto",
    ),
    "resume path nowhere": (
        ["trainer.resume_mode=path", "trainer.resume_from_path=/nowhere"],
        "trainer.resume_from_path",
        "does not exist",
        "a checkpoint folder",
        "set trainer.resume_mode=auto",
    ),
    "data file": (
        ["data.train_files=[/nowhere/a.parquet]"],
        "data.train_files",
        "does not exist",
        None,
        "check the path",
    ),
    "reward file": (
        ["custom_reward_function.path=/nowhere/r.py"],
        "custom_reward_function.path",
        "does not exist",
        None,
        "check the path",
    ),
    "own estimator's file": (
        ["algorithm.adv_estimator=/nowhere/mine.py:mine"],
        "algorithm.adv_estimator",
        "does not exist",
        None,
        "check the path before the colon",
    ),
    "model folder": (
        ["actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"],
        "actor_rollout_ref.model.path",
        "the hub has no model of that name",
        "a Hugging Face folder with config.json, or OWNER/NAME",
        hub.remedy("Qwen/Qwen2.5-0.5B"),
    ),
    "folder without a model": (
        ["critic.model.path=/"],
        "critic.model.path",
        "has no config.json",
        "a Hugging Face folder with config.json",
        "OWNER/NAME",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(errors, name):
    overrides, field, message, expected, remedy = WRONG[name]
    found = errors(*overrides)
    assert list(found) == [field]
    error = found[field]
    for text, given in ((message, error.message), (expected, error.expected), (remedy, error.remedy)):
        assert (text is None) == (given is None)
        assert text is None or text in given
