"""Tests of a server that is started here: proxies, its log, and the parameters sent to vLLM."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.vllm.process import VLLMProcess, sampling
from tandem.protocol import Request, SamplingParams


def start(folder: Path, **options: Any) -> VLLMProcess:
    """Start Python's own server in place of vLLM's. It answers /health."""
    (folder / "www").mkdir()
    (folder / "www" / "health").touch()
    (folder / "logs").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    command += ["--directory", str(folder / "www")]
    url, log = f"http://127.0.0.1:{port}", folder / "logs" / "log"
    return VLLMProcess(command, url, log, environment={}, start_timeout_s=30, **options)


def test_no_proxy_is_asked_for_a_server_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    start(tmp_path).close()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_temporary_log_goes_with_the_server(tmp_path: Path, keeps: bool) -> None:
    process = start(tmp_path, keeps_log=keeps)
    assert process.log.exists()
    process.close()
    process.close()
    assert process.log.exists() is process.log.parent.exists() is keeps


def test_the_log_of_a_server_that_failed_is_kept(tmp_path: Path) -> None:
    process = start(tmp_path, keeps_log=False)
    process._process.kill()
    process._process.wait(10)
    process.close()
    assert process.log.exists()


def test_every_parameter_is_asked_for_by_the_name_that_vllm_has() -> None:
    given: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "max_tokens": 9,
        "min_tokens": 2,
    }
    params = SamplingParams(**given, stop_token_ids=(7, 8), stop=("x",), logit_bias=((3, 1.5),), seed=4)
    request = Request("u", 1, np.arange(3), params)
    assert sampling(request) == {
        **given,
        "top_k": 0,  # keeps all tokens
        "stop_token_ids": [7, 8],
        "logit_bias": {3: 1.5},
        "seed": seed_of(request),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    assert "logit_bias" not in sampling(Request("u", 1, np.arange(3), SamplingParams(max_tokens=9)))
