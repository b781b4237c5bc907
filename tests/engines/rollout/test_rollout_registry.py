from importlib.util import find_spec

import pytest
import torch

from tandem.config.rollout import RolloutConfig
from tandem.engines.rollout.base import SharedModule, WeightStream, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.registry import make_rollout_engine
from tandem.errors import ConfigError

OPTIONS = {"tokenizer": None, "device": torch.device("cpu"), "max_length": 96}


@pytest.mark.parametrize(("name", "kind"), [("native", NativeEngine), ("hf", HFEngine)])
def test_engines_by_name(name, kind):
    engine = make_rollout_engine(name, RolloutConfig(), **OPTIONS, log=None)
    assert isinstance(engine, kind)


def test_other_names_are_refused():
    with pytest.raises(ConfigError, match="rollout engine") as caught:
        make_rollout_engine("nativ", RolloutConfig(), **OPTIONS, log=None)
    assert caught.value.field == "actor_rollout_ref.rollout.name"


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed():
    with pytest.raises(ConfigError, match="not installed") as caught:
        make_rollout_engine("vllm", RolloutConfig(), **OPTIONS, log=None, model_path="m", dtype=torch.float32)
    assert "pip install 'tandem[vllm]'" in caught.value.remedy


@pytest.mark.parametrize(
    ("config", "dtype", "field"),
    [
        ({}, torch.float64, "actor_rollout_ref.actor.fsdp_config.dtype"),
        (
            {"mode": "server", "logprobs_mode": "raw_logprobs"},
            torch.float32,
            "actor_rollout_ref.rollout.logprobs_mode",
        ),
    ],
)
def test_what_vllm_has_not(config, dtype, field):
    with pytest.raises(ConfigError) as caught:
        make_rollout_engine("vllm", RolloutConfig(**config), **OPTIONS, log=None, model_path="m", dtype=dtype)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize("silent", [True, False])
def test_disable_log_stats(name, silent, tiny, make_requests, monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.counters._LOG_EVERY_S", 0.0)
    lines = []
    config = RolloutConfig(disable_log_stats=silent)
    engine = make_rollout_engine(name, config, **OPTIONS, log=lines.append)
    engine.update_weights(SharedModule(tiny()), 0)
    generate(engine, make_requests(3))
    assert bool(lines) != silent


@pytest.mark.parametrize("name", ["native", "hf"])
def test_max_num_seqs_takes_effect(name, tiny, make_requests):
    engine = make_rollout_engine(name, RolloutConfig(max_num_seqs=2), **OPTIONS, log=None)
    engine.update_weights(SharedModule(tiny()), 0)
    generate(engine, make_requests(7))
    assert engine.stats()["peak_running"] == 2


def test_a_cache_that_stays_beside_training_has_half_of_the_memory():
    def share(**config):
        return make_rollout_engine("native", RolloutConfig(**config), **OPTIONS, log=None)._store.room.given

    assert share() is None and share(free_cache_engine=False) == 0.5
    assert (
        share(gpu_memory_utilization=0.7) == share(gpu_memory_utilization=0.7, free_cache_engine=False) == 0.7
    )


def test_runner_takes_effect(tiny, make_requests):
    engine = make_rollout_engine("native", RolloutConfig(), **OPTIONS, log=None, say=print)
    assert engine._say is print
    for runner, kind in (("auto", "FusedRunner"), ("fused", "FusedRunner"), ("module", "ModuleRunner")):
        engine = make_rollout_engine("native", RolloutConfig(runner=runner), **OPTIONS, log=None)
        engine.update_weights(SharedModule(tiny()), 0)
        assert type(engine._steps.runner).__name__ == kind


@pytest.mark.parametrize("name", ["native", "hf"])
def test_with_a_model_folder_streams_are_taken(name, tiny, make_requests, tmp_path):
    tiny().config.save_pretrained(tmp_path)
    module, requests, written = tiny(), make_requests(3), []
    for path, source in ((tmp_path, WeightStream(module.named_parameters())), (None, SharedModule(module))):
        engine = make_rollout_engine(name, RolloutConfig(), **OPTIONS, log=None, model_path=path)
        assert (WeightStream in engine.takes) == (path is not None)
        assert SharedModule in engine.takes
        engine.update_weights(source, 0)
        written.append([sample.token_ids.tolist() for sample in generate(engine, requests)])
    assert written[0] == written[1]
