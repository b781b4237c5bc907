"""Rollout engines that run on servers: what they need, and where they can be used."""

from __future__ import annotations

import pytest

from tandem.config.load import load_generate_config
from tandem.errors import ConfigErrors

R = "actor_rollout_ref.rollout"
SGLANG = (
    f"{R}.name=sglang",
    f"{R}.server.urls=[http://a:1,http://b:1]",
    f"{R}.server.weights_folder=/tmp/weights",
)


def test_sglang_trains(load):
    config = load(*SGLANG, f"{R}.server.request_timeout=60.0").config.actor_rollout_ref.rollout
    assert config.server.urls == ("http://a:1", "http://b:1")
    assert (config.server.request_timeout, config.server.weights_folder) == (60.0, "/tmp/weights")


def test_sglang_needs_addresses_and_a_folder(errors):
    found = errors(f"{R}.name=sglang")
    assert set(found) == {f"{R}.server.urls", f"{R}.server.weights_folder"}
    assert found[f"{R}.server.urls"].remedy == (
        f"set {R}.server.urls=[http://host:port], one per server; "
        f"or use {R}.name=vllm or native, which need none"
    )


@pytest.mark.parametrize("name", ["openai", "tgi"])
def test_engines_with_fixed_weights_do_not_train(errors, name):
    (error,) = errors(f"{R}.name={name}", f"{R}.server.urls=http://a:1").values()
    assert (error.field, error.got) == (f"{R}.name", name)
    assert "tandem generate" in error.remedy


@pytest.mark.parametrize(
    ("override", "field", "got"),
    [
        (f"{R}.server.urls=a:8000", f"{R}.server.urls", "a:8000"),
        (f"{R}.logprobs_mode=raw_logprobs", f"{R}.logprobs_mode", "raw_logprobs"),
    ],
)
def test_wrong_values(errors, override, field, got):
    (error,) = errors(*SGLANG, override).values()
    assert (error.field, error.got) == (field, got)


def test_servers_of_another_engine_have_no_effect(errors):
    (error,) = errors(f"{R}.server.urls=http://a:1").values()
    assert (error.field, error.message) == (f"{R}.server.urls", "has no effect")


def test_vllm_trains_on_servers_of_its_own_and_of_others(load, errors):
    alone = (f"{R}.name=vllm", f"{R}.mode=server", f"{R}.server.request_timeout=60.0")
    assert load(*alone).config.actor_rollout_ref.rollout.server.urls == ()
    server = load(*alone, f"{R}.server.urls=[http://a:1,http://b:1]", f"{R}.server.weights_backend=gloo")
    assert server.config.actor_rollout_ref.rollout.server.weights_backend == "gloo"
    assert set(errors(*alone, f"{R}.server.urls=a:1")) == {f"{R}.server.urls"}
    (error,) = errors(f"{R}.name=vllm", f"{R}.server.urls=http://a:1").values()
    assert error.message == "has no effect" and f"{R}.mode=server" in error.expected
    (error,) = errors(*SGLANG, f"{R}.server.weights_backend=gloo").values()
    assert (error.field, error.message) == (f"{R}.server.weights_backend", "has no effect")


def test_fixed_weights_validate(load, train_file):
    validation = (f"data.val_files={train_file}", "trainer.val_only=true")
    config = load(f"{R}.name=tgi", f"{R}.server.urls=http://a:1", *validation).config
    assert config.actor_rollout_ref.rollout.name == "tgi"


def test_fixed_weights_generate(train_file, model):
    required = [f"data.path={train_file}", "data.output_path=out.parquet", f"model.path={model}"]
    loaded = load_generate_config(None, [*required, "rollout.name=openai", "rollout.server.urls=http://a:1"])
    assert loaded.config.rollout.server.urls == ("http://a:1",)
    with pytest.raises(ConfigErrors, match=r"rollout\.server\.urls: missing"):
        load_generate_config(None, [*required, "rollout.name=tgi"])
