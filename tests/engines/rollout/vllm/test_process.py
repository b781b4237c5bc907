import sys
import time

import pytest
import torch
from transformers import CONFIG_MAPPING

from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http.process import ServerProcess
from tandem.engines.rollout.vllm.process import check_runs, sampling, serve
from tandem.errors import ConfigError, EngineError
from tests.engines.rollout.case import CPU, request
from tests.engines.rollout.vllm.models import build
from tests.engines.rollout.vllm.serving import free_port
from tests.support.refusing import refused


@pytest.fixture
def start(tmp_path):
    """Return a function that starts Python's own server in place of vLLM's. It answers /health."""

    def start(**options):
        (tmp_path / "www").mkdir()
        (tmp_path / "www" / "health").touch()
        (tmp_path / "logs").mkdir()
        port = free_port()
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
        command += ["--directory", str(tmp_path / "www")]
        options = {"environment": {}, "start_timeout_s": 30, **options}
        return ServerProcess(
            "a server", command, f"http://127.0.0.1:{port}", tmp_path / "logs" / "log", **options
        )

    return start


def test_no_proxy_is_asked_for_a_server_on_this_machine(start, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    start().close()


@pytest.mark.parametrize(("keeps", "killed"), [(True, False), (False, False), (False, True)])
def test_a_temporary_log_goes_with_a_server_that_did_not_fail(start, keeps, killed):
    process = start(keeps_log=keeps)
    assert process.log.exists()
    if killed:
        process._process.kill()
        process._process.wait(10)
    process.close()
    process.close()
    assert process.log.exists() is process.log.parent.exists() is (keeps or killed)


@pytest.mark.parametrize(("kind", "keys", "on_gpus", "why"), [
    ("dots1", {}, False, "no implementation"), ("minimax_m2", {}, True, "ignores the biases"),
    ("lfm2", {}, True, "one piece"), ("llama4_text", {"attention_chunk_size": 200}, True, "multiple of 128"),
])  # fmt: skip
def test_models_that_vllm_cannot_run_are_refused_before_the_run(kind, keys, on_gpus, why):
    config = CONFIG_MAPPING[kind](**keys)
    error = refused(ConfigError, lambda: check_runs(config, CPU), why)
    assert "native or hf" in error.remedy
    if on_gpus:
        check_runs(config, torch.device("cuda"))


def test_every_parameter_is_asked_for_by_the_name_that_vllm_has():
    same = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "max_tokens": 9, "min_tokens": 2}
    same |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    asked = request(**same, stop_token_ids=(7, 8), stop=("x",), logit_bias=((3, 1.5),), seed=4)
    lists = {"stop_token_ids": [7, 8], "logit_bias": {3: 1.5}, "seed": seed_of(asked)}
    fixed = {"ignore_eos": True, "logprobs": 0, "detokenize": False, "top_k": 0}  # keeps all tokens
    assert sampling(asked) == same | lists | fixed and "logit_bias" not in sampling(request())


def test_a_server_that_never_answers_is_ended(tmp_path):
    log, options = tmp_path / "log", {"environment": {}, "start_timeout_s": 0.5}
    started, asleep = time.monotonic(), (["sleep", "600"], "http://127.0.0.1:9", log)
    refused(EngineError, lambda: ServerProcess("a server", *asleep, **options), r"0\.5 s")
    assert time.monotonic() - started < 15


def test_without_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.vllm.process.find_spec", lambda _: None)
    options = {"device": CPU, "max_length": 64, "log": tmp_path / "log"}
    error = refused(ConfigError, lambda: serve(str(tmp_path), build().config, **options), "not installed")
    assert "tandem[vllm]" in error.remedy
