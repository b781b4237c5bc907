"""The attention kernels that a config requests."""

from __future__ import annotations

import pytest

from tandem.config.root import TrainConfig
from tandem.config.schema import keys
from tandem.models.attention_kernels import PACKAGES

AT = ("actor_rollout_ref.model.attn_implementation", "critic.model.attn_implementation")


@pytest.mark.parametrize("name", AT)
def test_a_package_on_a_cpu_is_refused(load, errors, name):
    error = errors(f"{name}=flash_attention_3", "trainer.device=cpu")[name]
    assert error.got == "flash_attention_3 with trainer.device=cpu"
    assert error.remedy == f"set {name}=auto, or trainer.device=cuda"
    load(f"{name}=flash_attention_3", "trainer.device=cuda")
    load(f"{name}=torch", "trainer.device=cpu")


def test_every_package_has_a_name(load, errors):
    for package in PACKAGES:
        model = load(f"{AT[0]}={package}", "trainer.device=cuda").config.actor_rollout_ref.model
        assert model.attn_implementation == package
    error = errors(f"{AT[0]}=flash_attention_5")[AT[0]]
    assert error.expected == f"one of auto, torch, {', '.join(PACKAGES)}, sdpa"


def test_names_of_others(load):
    """PyTorch's attention by transformers' name, and the key by verl's."""
    loaded = load(f"{AT[0]}=sdpa")
    assert loaded.config.actor_rollout_ref.model.attn_implementation == "torch"
    other = "actor_rollout_ref.model.override_config.attn_implementation"
    loaded = load(f"{other}=flash_attention_2", "trainer.device=cuda")
    assert loaded.config.actor_rollout_ref.model.attn_implementation == "flash_attention_2"
    assert loaded.notices == (f"{other} is {AT[0]}=flash_attention_2 here.",)


def test_a_run_goes_on_with_other_kernels():
    assert all(keys(TrainConfig)[name].resumed == "reported" for name in AT)
