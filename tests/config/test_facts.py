"""Facts that follow from a config: the engines and models of a run, and the sizes of a model's folder."""

import json
from pathlib import Path

from tandem.config.facts import engines, models, size_of, uneven

A, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"


def found(config) -> list[tuple[str, str, str]]:
    return [(model.role, model.engine.at, model.path) for model in models(config)]


def test_the_models_are_those_that_the_run_has(load, model):
    config = load("GRPO").config
    assert found(config) == [("actor", A, model)]
    config = load("algorithm.adv_estimator=gae", f"{A}.use_kl_loss=true").config
    assert found(config) == [("actor", A, model), ("critic", "critic", model), ("ref", REF, model)]
    assert list(engines(config)) == ["actor", "ref", "critic", "reward_model"]


def test_several_references_are_models_of_one_engine(load, model, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    several = f"{REF}.models={{one: {{path: {tmp_path / 'other'}}}, two: {{weight: 0.5}}}}"
    config = load("GRPO A.use_kl_loss=true", several).config
    assert found(config)[1:] == [("ref.one", REF, str(tmp_path / "other")), ("ref.two", REF, model)]


def test_keys_lie_below_the_engines_section(load):
    every = engines(load().config)
    assert every["critic"].key("fsdp_config.dtype") == "critic.fsdp_config.dtype"
    assert every["critic"]._replace(at="").key("fsdp_config.dtype") == "fsdp_config.dtype"


def test_sizes_that_devices_cannot_share(tmp_path):
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 6}
    for stored in (sizes, {"text_config": sizes}):
        (tmp_path / "config.json").write_text(json.dumps(stored))
        assert size_of(str(tmp_path), "num_attention_heads") == 12
        assert uneven(str(tmp_path), 4) == "num_key_value_heads 2, intermediate_size 6"
        assert uneven(str(tmp_path), 4, leave_out=["num_key_value_heads"]) == "intermediate_size 6"
        assert uneven(str(tmp_path), 2) == ""
    assert size_of(str(Path("nowhere")), "num_attention_heads") is None and uneven("nowhere", 3) == ""
