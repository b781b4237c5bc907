from importlib.util import find_spec

import pytest
import torch

from tandem.config.rollout import RolloutConfig
from tandem.engines.rollout.base import SharedModule, WeightStream, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.registry import make_rollout_engine
from tandem.errors import ConfigError
from tests.engines.rollout.case import CPU, stream, tokens
from tests.support.refusing import refused

both_engines = pytest.mark.parametrize("name", ["native", "hf"])


def make(name, config=None, model=None, log=None, **options):
    options = {"tokenizer": None, "device": CPU, "max_length": 96, "log": log, **options}
    engine = make_rollout_engine(name, RolloutConfig(**(config or {})), **options)
    if model is not None:
        engine.update_weights(SharedModule(model), 0)
    return engine


@pytest.mark.parametrize(("name", "config", "dtype", "field"), [
    ("nativ", {}, torch.float32, "rollout.name"), ("vllm", {}, torch.float64, "actor.fsdp_config.dtype"),
    ("vllm", {"mode": "server", "logprobs_mode": "raw_logprobs"}, torch.float32, "rollout.logprobs_mode"),
])  # fmt: skip
def test_what_there_is_not_is_refused(name, config, dtype, field):
    error = refused(ConfigError, lambda: make(name, config, model_path="m", dtype=dtype))
    assert error.field == f"actor_rollout_ref.{field}"


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed():
    error = refused(ConfigError, lambda: make("vllm", model_path="m", dtype=torch.float32), "not installed")
    assert "pip install 'tandem[vllm]'" in error.remedy


@both_engines
def test_log_lines_and_max_num_seqs(name, tiny, make_requests, monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.counters._LOG_EVERY_S", 0.0)
    for silent in (True, False):
        lines = []
        engine = make(name, {"disable_log_stats": silent, "max_num_seqs": 2}, tiny(), lines.append)
        assert type(engine) is {"native": NativeEngine, "hf": HFEngine}[name]
        generate(engine, make_requests(7))
        assert engine.stats()["peak_running"] == 2
        assert bool(lines) != silent
    assert "running" in lines[0] and "tokens/s" in lines[0]


@pytest.mark.parametrize(("config", "share"), [
    ({}, None), ({"free_cache_engine": False}, 0.5), ({"gpu_memory_utilization": 0.7}, 0.7),
    ({"gpu_memory_utilization": 0.7, "free_cache_engine": False}, 0.7),
])  # fmt: skip
def test_a_cache_that_stays_beside_training_has_half_of_the_memory(config, share):
    assert make("native", config)._store.room.given == share


def test_runner_takes_effect(tiny):
    assert make("native", say=print)._say is print
    for runner, kind in (("auto", "FusedRunner"), ("fused", "FusedRunner"), ("module", "ModuleRunner")):
        engine = make("native", {"runner": runner}, tiny())
        assert type(engine._steps.runner).__name__ == kind


@both_engines
def test_with_a_model_folder_streams_are_taken(name, tiny, make_requests, tmp_path):
    tiny().config.save_pretrained(tmp_path)
    written = []
    for path, source in ((tmp_path, stream(tiny())), (None, SharedModule(tiny()))):
        engine = make(name, model_path=path)
        assert SharedModule in engine.takes and (WeightStream in engine.takes) == (path is not None)
        engine.update_weights(source, 0)
        written.append(tokens(generate(engine, make_requests(3))))
    assert written[0] == written[1]
