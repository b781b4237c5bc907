"""Tests of the engine on real vLLM servers that were started elsewhere, with weights over gloo.

See `make test-vllm`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.config.rollout import RolloutConfig, ServerConfig
from tandem.engines.rollout.base import RolloutEngine, WeightStream, generate
from tandem.engines.rollout.http.connection import ServerLost
from tandem.engines.rollout.http.router import Router
from tandem.engines.rollout.registry import make_rollout_engine
from tandem.engines.rollout.vllm.process import VLLMProcess, serve
from tandem.engines.rollout.vllm.server import VLLMServerEngine
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tests.engines.rollout.vllm.models import build, log_probs, make_requests, save, stream

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
CPU = torch.device("cpu")


def connect(folder: Path, *servers: VLLMProcess) -> RolloutEngine:
    urls = tuple(server.url for server in servers)
    rollout = RolloutConfig(
        name="vllm",
        mode="server",
        max_num_seqs=8,
        server=ServerConfig(urls=urls, request_timeout=120.0, weights_backend="auto"),
    )
    return make_rollout_engine(
        "vllm",
        rollout,
        tokenizer=None,
        device=CPU,
        max_length=96,
        log=None,
        model_path=str(folder),
        dtype=torch.float32,
    )


def check_samples(engine: RolloutEngine, model: Any, version: int) -> None:
    requests = make_requests(4, temperature=0.9)
    for request, sample in zip(requests, generate(engine, requests), strict=True):
        assert set(sample.versions.tolist()) == {version}
        expected = log_probs(model, request, sample)
        np.testing.assert_allclose(sample.log_probs, expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(build(seed=9), folder)
    return folder


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[VLLMProcess]]:
    def start(number: int) -> VLLMProcess:
        log = folder / f"server_{number}.log"
        return serve(str(folder), build().config, device=CPU, max_length=96, max_num_seqs=8, log=log)

    with ThreadPoolExecutor() as pool, ExitStack() as held:
        starting = [pool.submit(start, number) for number in range(2)]
        for each in starting:
            held.callback(each.result().close)
        yield [each.result() for each in starting]


def test_weights_arrive_over_the_network_again_and_again(folder, servers):
    engine = connect(folder, servers[0])
    assert isinstance(engine, VLLMServerEngine) and engine.takes == {WeightStream}
    engine._bucket_bytes = 20_000  # some buckets then hold one tensor, and some several
    with pytest.raises(EngineError, match="no weights"):
        engine.submit(make_requests(1))
    for version in (1, 2):
        model = build(seed=version)
        assert engine.update_weights(stream(model), version) == digest(model.named_parameters())
        check_samples(engine, model, version)
    engine.close()


def test_refused_weights_are_told_and_others_mend_it(folder, servers):
    engine = connect(folder, servers[0])
    with pytest.raises(EngineError, match="refused"):
        engine.update_weights(stream(build("qwen3")), 1)
    with pytest.raises(EngineError, match="no weights"):
        engine.submit(make_requests(1))
    model = build(seed=3)
    assert engine.update_weights(stream(model), 2) == digest(model.named_parameters())
    check_samples(engine, model, 2)
    engine.close()


def test_several_servers_and_one_that_vanishes_while_weights_are_sent(folder, servers):
    """This is the last test, because it kills one of the servers."""
    engine = connect(folder, *servers)
    assert isinstance(engine, Router)
    model = build(seed=4)
    assert engine.update_weights(stream(model), 1) == digest(model.named_parameters())
    check_samples(engine, model, 1)

    alone = connect(folder, servers[1])
    new = build(seed=5)
    alone._bucket_bytes = 20_000

    def dies(at, tensor):
        if at == "model.norm.weight":
            os.killpg(servers[1]._process.pid, signal.SIGKILL)
            servers[1]._process.wait(30)
        return tensor

    began = time.monotonic()
    with pytest.raises(ServerLost) as caught:
        alone.update_weights(stream(new, dies), 2)
    assert time.monotonic() - began < 60
    assert servers[1].url in str(caught.value.got)
    alone.close()

    assert engine.update_weights(stream(new), 2) == digest(
        new.named_parameters()
    )  # the other server continues
    check_samples(engine, new, 2)
    engine.close()
