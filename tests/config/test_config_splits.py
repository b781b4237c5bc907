"""The numbers of devices that split a model, compared with the sizes in the model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

A = "actor_rollout_ref.actor"
LAYERS, TOKENS = f"{A}.fsdp_config.tensor_parallel_size", f"{A}.ulysses_sequence_parallel_size"
STAGES, SCHEDULE = f"{A}.fsdp_config.pipeline_parallel_size", f"{A}.fsdp_config.pipeline_schedule"
SIZES = {
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 6,
    "num_hidden_layers": 3,
}


@pytest.mark.parametrize(
    ("overrides", "field", "got"),
    [
        ([f"{LAYERS}=3"], LAYERS, "3, of 8 devices"),
        ([f"{LAYERS}=4"], LAYERS, "4 devices, num_key_value_heads 2, intermediate_size 6 in"),
        ([f"{LAYERS}=2", f"{TOKENS}=4"], TOKENS, "4 devices, 6 heads"),
        ([f"{TOKENS}=8"], TOKENS, "8 devices, 12 heads"),
        ([f"{STAGES}=3"], STAGES, "3, of 8 devices"),
        ([f"{STAGES}=4"], STAGES, "4 stages, num_hidden_layers 3 in"),
        ([f"{STAGES}=2", f"{LAYERS}=3"], LAYERS, "3, of 4 devices"),
        ([f"{STAGES}=2", f"{A}.fsdp_config.fsdp_size=8"], f"{A}.fsdp_config.fsdp_size", "8, of 4 devices"),
        ([f"{LAYERS}=2", f"{A}.fsdp_config.fsdp_size=8"], f"{A}.fsdp_config.fsdp_size", "8, of 4 devices"),
    ],
)
def test_sizes_that_do_not_go_together(errors, model, overrides, field, got):
    (Path(model) / "config.json").write_text(json.dumps(SIZES))
    found = errors("trainer.n_gpus_per_node=8", *overrides)
    assert got in str(found[field].got)


def test_devices_that_do_not_divide_are_told_what_would(errors):
    found = errors("trainer.n_gpus_per_node=4", f"{TOKENS}=3", f"{A}.fsdp_config.fsdp_size=3")
    for field, plain in ((TOKENS, 1), (f"{A}.fsdp_config.fsdp_size", -1)):
        assert found[field].expected == "a divisor of 4"
        assert found[field].remedy == f"set {field}={plain}, or change the number of devices"


def test_sizes_that_go_together(errors, load, model):
    (Path(model) / "config.json").write_text(json.dumps(SIZES))
    loaded = load(
        "trainer.n_gpus_per_node=8",
        f"{LAYERS}=2",
        f"{TOKENS}=2",
        f"{STAGES}=2",
        f"{SCHEDULE}=gpipe",
        f"{A}.fsdp_config.fsdp_size=2",
    )
    found = loaded.config.actor_rollout_ref.actor.fsdp_config
    assert (found.tensor_parallel_size, found.pipeline_parallel_size) == (2, 2)
    assert found.pipeline_schedule == "gpipe" and not any(SCHEDULE in notice for notice in loaded.notices)


def test_activations_of_a_stage_stay_on_the_device(errors):
    offload = "actor_rollout_ref.model.enable_activation_offload"
    found = errors("trainer.n_gpus_per_node=2", f"{STAGES}=2", f"{offload}=true")
    assert found[offload].got == f"true with {STAGES}=2"


def test_a_model_in_stages_has_no_adapters(errors):
    rank = "actor_rollout_ref.model.lora_rank"
    found = errors("trainer.n_gpus_per_node=2", f"{STAGES}=2", f"{rank}=8")
    assert found[rank].got == f"8 with {STAGES}=2"


def test_a_schedule_of_one_stage_is_said_to_do_nothing(load):
    notices = load(f"{SCHEDULE}=gpipe").notices
    assert f"{SCHEDULE}: no effect; used only if {STAGES} is 2 or more." in notices


def test_a_reference_that_is_split_otherwise_than_its_actor_is_checked_too(errors, load, model):
    (Path(model) / "config.json").write_text(json.dumps(SIZES))
    tokens = "actor_rollout_ref.ref.ulysses_sequence_parallel_size"
    given = ("trainer.n_gpus_per_node=8", f"{A}.use_kl_loss=true")
    found = errors(*given, f"{tokens}=8")
    assert list(found) == [tokens] and "8 devices, 12 heads in" in str(found[tokens].got)
    assert load(*given, f"{tokens}=4").config.actor_rollout_ref.ref.ulysses_sequence_parallel_size == 4
