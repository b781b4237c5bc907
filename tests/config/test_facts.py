"""What follows from a config: engines, models, and sizes, compared with numbers computed by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config.facts import engines, models, size_of, uneven
from tandem.config.sizes import derived

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


def test_sizes_with_a_critic(load):
    config = load(
        "data.train_batch_size=96 data.max_prompt_length=100 data.max_response_length=28 R.n=4",
        "A.ppo_mini_batch_size=32 A.ppo_epochs=2 A.ppo_micro_batch_size_per_gpu=8 A.use_kl_loss=true",
        "critic.ppo_mini_batch_size=48 critic.use_dynamic_bsz=true",
        "trainer.total_epochs=3 trainer.critic_warmup=5",
    ).config
    assert derived(config, train_rows=1000) == {
        "devices": 1, "prompts per step": 96, "samples per step": 384, "longest sequence": 128,
        "tokens per step at most": 49152, "actor mini-batches per step": 3,
        "samples per actor mini-batch": 128, "actor optimizer steps per step": 6,
        "micro-batches, actor update": "at most 8 samples per device",
        "micro-batches, old log-probs": "all samples at once",
        "micro-batches, reference log-probs": "all samples at once",
        "critic mini-batches per step": 2, "critic optimizer steps per step": 4,
        "micro-batches, critic update": "at most 32768 tokens per device",
        "micro-batches, values": "at most 32768 tokens per device",
        "steps per epoch": 10, "steps": 30, "actor optimizer steps": 150,
    }  # fmt: skip


def test_steps_depend_on_the_rows_unless_given(load):
    assert {"steps", "steps per epoch"}.isdisjoint(derived(load().config))
    for given, optimizer_steps in (("steps=7", 7), ("steps=7 A.ppo_mini_batch_size=256", 28)):
        sizes = derived(load(given).config)
        assert (sizes["steps"], sizes["actor optimizer steps"]) == (7, optimizer_steps)


def test_phases_that_do_not_run_have_no_sizes(load):
    sizes = derived(load("GRPO").config)
    assert not [name for name in sizes if "critic" in name or "reference" in name or "values" in name]


def test_generation_batches_and_group_sizes_are_told_where_they_differ(load):
    plain = derived(load("R.n=2").config)
    sizes = derived(load("R.n=2 R.n_schedule={10: 4} F.enable=true data.gen_batch_size=1536").config)
    assert sizes["prompts per generation batch"] == 1536
    assert sizes["responses per prompt"] == "2 from step 1, 4 from step 10; the sizes below assume 2"
    assert set(sizes) - set(plain) == {"prompts per generation batch", "responses per prompt"}


PROGRAM = """
import sys
from tandem.config.sizes import derived
from tandem.config.load import load_train_config
from tandem.errors import ConfigErrors
try:
    derived(load_train_config(None, sys.argv[1:]).config)
except ConfigErrors as errors:
    print(len(errors.errors))
heavy = {"torch", "transformers", "numpy", "ray", "pyarrow", "rich"} & set(sys.modules)
heavy |= {"docs.readers", "tandem.config.explain"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("given", ["", "trainer.nnodes=two data.foo=1 trainer.test_freq=3"])
def test_a_config_is_loaded_or_refused_without_heavy_imports(required, given):
    command = [sys.executable, "-c", PROGRAM, *required, *given.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ("3\n" if given else "")
