"""Kernels that the configured device cannot run are refused before the device is used."""

from __future__ import annotations

import pytest

from tandem.config.load import load_sft_config
from tandem.errors import ConfigErrors

MODEL = "actor_rollout_ref.model"
BACKEND = "fused_kernel_options.impl_backend"


@pytest.mark.parametrize("backend", ["triton", "liger"])
def test_head_for_cuda_on_a_cpu(load, errors, backend):
    asked = [f"{MODEL}.use_fused_kernels=true", f"{MODEL}.{BACKEND}={backend}"]
    error = errors(*asked, "trainer.device=cpu")[f"{MODEL}.{BACKEND}"]
    assert error.remedy == f"set {MODEL}.{BACKEND}=auto, or trainer.device=cuda"
    for device in ("cuda", "auto"):
        config = load(*asked, f"trainer.device={device}").config
        assert config.actor_rollout_ref.model.head == backend
    assert load(asked[1], "trainer.device=cpu").config.actor_rollout_ref.model.head == "auto"


@pytest.mark.parametrize("asked", ["null", "false", "true"])
def test_head_by_default(load, asked):
    config = load(f"{MODEL}.use_fused_kernels={asked}", f"{MODEL}.{BACKEND}=auto").config
    assert config.actor_rollout_ref.model.head == ("torch" if asked == "false" else "auto")
    assert config.critic.model.head == "auto"


@pytest.mark.parametrize("at", [MODEL, "critic.model", "reward_model.model"])
def test_liger_on_a_cpu(load, errors, at):
    scores = ("reward_model.enable=true", f"reward_model.model.path=${{{MODEL}.path}}")
    error = errors(f"{at}.use_liger=true", "trainer.device=cpu", *scores)[f"{at}.use_liger"]
    assert "CUDA" in error.message
    load(f"{at}.use_liger=true", "trainer.device=cuda", *scores)


def test_what_a_model_needs_that_is_not_there_is_not_asked(load):
    (notice,) = load("reward_model.model.use_liger=true", "trainer.device=cpu").notices
    assert "reward_model.model.use_liger: no effect" in notice and "reward_model.enable=true" in notice


def test_supervised_runs_are_asked_the_same(train_file, model):
    asked = ["model.use_liger=true", "model.use_fused_kernels=true", f"model.{BACKEND}=triton"]
    with pytest.raises(ConfigErrors) as caught:
        load_sft_config(
            None, [f"data.train_files={train_file}", f"model.path={model}", *asked, "trainer.device=cpu"]
        )
    assert {error.field for error in caught.value.errors} == {"model.use_liger", f"model.{BACKEND}"}
