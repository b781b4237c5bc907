"""`rollout.tensor_model_parallel_size` with different engines, models and numbers of devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config.load import load_generate_config
from tandem.errors import ConfigErrors

ROLLOUT = "actor_rollout_ref.rollout"
FIELD = f"{ROLLOUT}.tensor_model_parallel_size"
SERVERS = [f"{ROLLOUT}.server.urls=[http://a:1]", f"{ROLLOUT}.server.weights_folder=/tmp"]


def with_layers(model: str, **counts: int) -> None:
    (Path(model) / "config.json").write_text(json.dumps(counts))


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_the_devices_of_the_actor_make_engines_of_some_each(load, model, engine):
    with_layers(model, num_attention_heads=8, num_key_value_heads=4, intermediate_size=32)
    loaded = load(f"{ROLLOUT}.name={engine}", f"{FIELD}=4", "trainer.n_gpus_per_node=8")
    assert not loaded.notices
    assert loaded.config.actor_rollout_ref.rollout.split == 4


def test_several_devices_may_have_the_same_head_of_keys_and_values_in_vllm(load, errors, model):
    with_layers(model, num_attention_heads=8, num_key_value_heads=2, intermediate_size=32)
    keys = [f"{FIELD}=4", "trainer.n_gpus_per_node=4"]
    assert load(f"{ROLLOUT}.name=vllm", *keys).config.actor_rollout_ref.rollout.split == 4
    error = errors(f"{ROLLOUT}.name=native", *keys)[FIELD]
    assert error.got == f"4 devices, num_key_value_heads 2 in {model}"


def test_layers_that_cannot_be_split_evenly_are_refused(errors, model):
    with_layers(model, num_attention_heads=6, num_key_value_heads=3, intermediate_size=32)
    error = errors(f"{ROLLOUT}.name=vllm", f"{FIELD}=4", "trainer.n_gpus_per_node=4")[FIELD]
    assert error.got == f"4 devices, num_attention_heads 6, num_key_value_heads 3 in {model}"


def test_devices_that_make_no_whole_number_of_engines_are_refused(errors):
    error = errors(f"{ROLLOUT}.name=vllm", f"{FIELD}=4", "trainer.n_gpus_per_node=6")[FIELD]
    assert error.got == "4, with 6 devices"


@pytest.mark.parametrize("keys", [["name=sglang"], ["name=vllm", "mode=server"]])
def test_servers_have_the_devices_that_they_were_started_with(load, keys):
    loaded = load(*(f"{ROLLOUT}.{key}" for key in keys), f"{FIELD}=4", *SERVERS[: 3 - len(keys)])
    (notice,) = loaded.notices
    assert notice.startswith(f"{FIELD}=4: no effect")
    assert loaded.config.actor_rollout_ref.rollout.split == 1


def test_a_server_that_a_worker_starts_has_one_device(errors):
    error = errors(
        f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.mode=server", f"{FIELD}=2", "trainer.n_gpus_per_node=2"
    )[FIELD]
    assert "started by a worker" in error.message
    assert f"{ROLLOUT}.mode=colocate" in error.remedy


def test_commands_of_one_device_have_nothing_to_split(model, train_file):
    given = [f"model.path={model}", f"data.path={train_file}", "rollout.tensor_model_parallel_size=2"]
    with pytest.raises(ConfigErrors) as caught:
        load_generate_config(None, [*given, "rollout.name=vllm"])
    assert "rollout.tensor_model_parallel_size" in {error.field for error in caught.value.errors}
