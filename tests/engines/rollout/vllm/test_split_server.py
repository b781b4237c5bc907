"""Tests of the engine on a vLLM server that was started elsewhere over two devices.

See `make test-vllm`.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.vllm.process import VLLMProcess
from tandem.engines.rollout.vllm.server import Network, VLLMServerEngine
from tandem.engines.weight_sync import digest
from tests.engines.rollout.vllm.models import build, log_probs, make_requests, save, stream

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OPTIONS = (
    "--tensor-parallel-size 2 --max-model-len 96 --max-num-seqs 8 --dtype float32 --load-format dummy "
    "--kv-cache-memory-bytes 4000000 --skip-tokenizer-init --enable-scale-out --enforce-eager "
    "--no-enable-chunked-prefill --logprobs-mode processed_logprobs "
    "--worker-extension-cls tandem.engines.rollout.vllm.worker.WorkerExtension"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    folder: Path = tmp_path_factory.mktemp("split")
    (folder / "neutral").mkdir()
    (folder / "neutral" / "generation_config.json").write_text("{}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", save(build(seed=9), folder / "model"), *OPTIONS.split()]
    command += ["--generation-config", str(folder / "neutral")]
    process = VLLMProcess(
        command,
        f"http://127.0.0.1:{port}",
        folder / "log",
        environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        start_timeout_s=600,
    )
    yield process
    process.close()


def test_each_of_its_workers_takes_its_part_of_the_weights(server):
    cpu = torch.device("cpu")
    engine = VLLMServerEngine(
        Server(server.url),
        config=build().config,
        max_length=96,
        max_num_seqs=8,
        network=Network(cpu),
        bucket_bytes=20_000,
    )
    for version in (1, 2):
        model = build(seed=version)
        assert engine.update_weights(stream(model), version) == digest(model.named_parameters())
        requests = make_requests(4, 2, temperature=0.9)
        for request, sample in zip(requests, generate(engine, requests), strict=True):
            expected = log_probs(model, request, sample)
            np.testing.assert_allclose(sample.log_probs, expected, atol=1e-4, rtol=0)
    engine.close()
