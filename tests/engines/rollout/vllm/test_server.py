"""Tests of the engine on a real vLLM server that it starts itself.

See `make test-vllm`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.vllm.process import VLLMProcess, serve
from tandem.engines.rollout.vllm.server import VLLMServerEngine
from tandem.engines.weight_sync import Sent, WeightSyncError, check_arrival, digest
from tandem.errors import ConfigError, EngineError
from tandem.protocol import Request, SamplingParams
from tests.engines.rollout.vllm.models import build, log_probs, make_requests, save, stream

pytest.register_assert_rewrite("tests.contract.rollout")
from tests.contract.rollout import RolloutContract  # noqa: E402
from tests.contract.world import EngineKind  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # a starting server imports vLLM three times
CPU = torch.device("cpu")


def start(folder: Path, model: Any, decode: Any = None, **options: Any) -> VLLMServerEngine:
    engine_options = {name: options.pop(name) for name in ("bucket_bytes",) if name in options}
    process = serve(str(folder), model.config, device=CPU, log=folder / "server.log", **options)
    return VLLMServerEngine(
        Server(process.url, request_timeout_s=120),
        config=model.config,
        max_length=options["max_length"],
        max_num_seqs=options["max_num_seqs"],
        process=process,
        decode=decode,
        **engine_options,
    )


class TestVLLMServer(RolloutContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls) -> EngineKind:
        def make(world: Any, **options: Any) -> VLLMServerEngine:
            return start(world.folder, world.module, world.decode, **options)

        return EngineKind("vllm-server", make, stream, keyed=False, untruncated=False, modes=())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerEngine]:
    """Yield an engine whose model has tied embeddings. Some weight buckets hold one tensor, some several."""
    folder = tmp_path_factory.mktemp("model")
    save(build(seed=9), folder)
    engine = start(folder, build(), max_length=96, max_num_seqs=8, bucket_bytes=20_000)
    yield engine
    engine.close()


@pytest.fixture
def engine(made: VLLMServerEngine) -> VLLMServerEngine:
    model = build()
    assert made.update_weights(stream(model), 0) == digest(model.named_parameters())
    return made


def running(engine: VLLMServerEngine) -> float:
    """Return the number of sequences that the server reports."""
    with urllib.request.urlopen(f"{engine.server.url}/metrics", timeout=10) as said:
        lines = said.read().decode().splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def test_an_aborted_request_ends_on_the_server(engine):
    request = Request("long", 0, np.arange(5), SamplingParams(max_tokens=90))
    engine.submit([request])
    until = time.monotonic() + 20
    while not running(engine) and time.monotonic() < until:
        engine.poll(0.0)
    [partial] = engine.abort([request.id], keep_partial=True)
    assert len(partial.token_ids) < 90
    while running(engine) and time.monotonic() < until:
        time.sleep(0.05)
    assert running(engine) == 0


def test_weights_may_change_in_mid_response(engine):
    """Tokens have the version that generated them, not the version at their arrival."""
    requests = make_requests(4, temperature=0.9, max_tokens=56)
    engine.submit(requests)
    before = engine.progress()
    while engine.progress() == before:
        engine.poll(0.0)
    new = build(seed=5)
    engine.update_weights(stream(new), 7)
    done = {}
    while engine.pending():
        done |= {sample.id: sample for sample in engine.poll(10.0)}
    olds = []
    for request in requests:
        sample = done[request.id]
        old = int((sample.versions == 0).sum())
        assert sample.versions.tolist() == [0] * old + [7] * (56 - old)
        first, second = (log_probs(weights, request, sample) for weights in (build(), new))
        np.testing.assert_allclose(sample.log_probs[:old], first[:old], atol=1e-4, rtol=0)
        np.testing.assert_allclose(sample.log_probs[old:], second[old:], atol=1e-4, rtol=0)
        olds.append(old)
    assert 0 < max(olds) < 56


def test_a_weight_that_did_not_arrive_is_named(engine):
    new, name = build(seed=5), "model.layers.0.self_attn.k_proj.weight"
    old = dict(build().named_parameters())[name].detach()
    held = engine.update_weights(stream(new, lambda at, t: old.clone() if at == name else t), 1)
    sent, before = (Sent(v, digest(m.named_parameters())) for v, m in ((1, new), (0, build())))
    with pytest.raises(WeightSyncError) as caught:
        check_arrival(sent, held, engine="vllm", before=before)
    assert caught.value.field == name
    assert "still that of version 0" in caught.value.got


def test_refused_weights_leave_a_server_without_and_new_ones_mend_it(engine):
    with pytest.raises(EngineError, match="refused"):
        engine.update_weights(stream(build("qwen3")), 1)
    with pytest.raises(EngineError, match="no weights"):
        engine.submit(make_requests(1))
    engine.update_weights(stream(build()), 2)
    [sample] = generate(engine, make_requests(1))
    assert set(sample.versions.tolist()) == {2}


def test_a_server_with_other_log_probs_is_refused(engine, monkeypatch):
    async def raw(*_: Any, **__: Any) -> Any:
        return {"choices": [{"logprobs": {"content": [{"logprob": -1.5}]}}]}

    monkeypatch.setattr(engine, "_connected", False)
    monkeypatch.setattr(engine, "ask", raw)
    with pytest.raises(EngineError, match="another distribution") as caught:
        engine.submit(make_requests(1))
    assert "processed_logprobs" in caught.value.remedy


def test_a_server_killed_in_mid_generation_names_what_was_pending(made):
    """This is the last test, because it kills the server."""
    made.update_weights(stream(build()), 0)
    requests = [Request("long", i, np.arange(5), SamplingParams(max_tokens=90)) for i in range(3)]
    group = made._process._process.pid
    while made.pending() < 3:
        if not made.pending():  # they may be finished before they are seen
            made.submit(requests)
        while made.pending() and not running(made):
            made.poll(0.0)
        os.killpg(group, signal.SIGSTOP)
        made.poll(0.5)  # those that finished before the server was stopped
        if made.pending() < 3:
            os.killpg(group, signal.SIGCONT)
            made.poll(0.1)
    os.killpg(group, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended with status -9") as caught:
        made.poll(30.0)
    assert caught.value.field.startswith("3 requests pending, the first: request ('long', ")
    assert "server.log" in caught.value.got


def test_a_server_that_cannot_start_says_why(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(EngineError, match="ended with status 1") as caught:
        serve(str(tmp_path), build().config, device=CPU, max_length=64, log=tmp_path / "log")
    assert "no such model" in (tmp_path / "log").read_text()
    assert caught.value.got.startswith(str(tmp_path / "log"))


def test_a_server_that_never_answers_is_ended(tmp_path):
    started = time.monotonic()
    with pytest.raises(EngineError, match="did not answer in"):
        VLLMProcess(
            ["sleep", "600"], "http://127.0.0.1:9", tmp_path / "log", environment={}, start_timeout_s=0.5
        )
    assert time.monotonic() - started < 15


def test_without_vllm(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.vllm.process.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        serve(str(tmp_path), build().config, device=CPU, max_length=64, log=tmp_path / "log")
    assert "tandem[vllm]" in caught.value.remedy


KILLED = """
import sys, time
from contextlib import suppress
from pathlib import Path
import torch
from transformers import AutoConfig
from tandem.engines.rollout.vllm.process import serve
folder = Path(sys.argv[1])
made = serve(str(folder), AutoConfig.from_pretrained(folder), device=torch.device("cpu"), max_length=64,
             max_num_seqs=4, log=folder / "server.log")
print(made._process.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_a_trainer_that_is_killed(tmp_path):
    save(build(), tmp_path)
    trainer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with trainer:
        group = int(trainer.stdout.readline())
        assert alive(group)
        trainer.kill()
        until = time.monotonic() + 20
        while alive(group) and time.monotonic() < until:
            time.sleep(0.1)
        assert not alive(group)


def alive(group: int) -> list[int]:
    """Return the processes of a process group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                found.append(int(path.parent.name))
    return found
