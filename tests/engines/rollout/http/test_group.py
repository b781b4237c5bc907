"""Two ranks that share one server, which the first of them starts."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.http import group as groups
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.group import GroupEngine, device_name
from tandem.engines.rollout.sglang.engine import SGLangEngine
from tandem.engines.weight_sync import digest
from tandem.errors import ConfigError, EngineError, TandemError
from tests.engines.rollout.case import CPU, request, stream
from tests.engines.rollout.sglang.fake_sglang import FakeSGLang
from tests.engines.train.on_ranks import on_ranks
from tests.support.tiny import make_model


class Running:
    def check(self, within_s=0.0): ...

    def close(self): ...


def said(call):
    """Return the field of the error that the call raises."""
    try:
        call()
    except TandemError as error:
        return error.field or error.message
    return None


def works(folder):
    module = AutoModelForCausalLM.from_pretrained(folder)
    servers, names = [], []

    def start(devices):
        names.extend(devices)
        servers.append(FakeSGLang(AutoModelForCausalLM.from_pretrained(folder)))
        options = {"config": module.config, "max_length": 96, "process": Running()}
        return SGLangEngine(Server(servers[0].url), **options)

    engine = GroupEngine(dist.group.WORLD, CPU, start)
    found = {"devices": names, "digest": engine.update_weights(stream(module), 1)}
    requests = [request("u", i, 4, max_tokens=5, seed=2) for i in range(3)]
    found["tokens"] = [sample.token_ids.tolist() for sample in generate(engine, requests)]
    found["progress"], found["counted"] = engine.progress(), engine.stats().get("generated_tokens")
    found["refused"] = said(lambda: engine.submit([request("u", 0, 4, repetition_penalty=3.0)]))
    engine.submit([request("v", 0, 4, max_tokens=90)])
    found["pending"] = engine.pending()
    (partial,) = engine.abort([("v", 0)], keep_partial=True)
    found["aborted"] = partial.finish_reason, engine.pending()
    engine.sleep()
    found["asleep"] = said(lambda: engine.submit(requests))
    if servers:
        servers[0].refusal = "size mismatch"
    found["update"] = said(lambda: engine.update_weights(stream(module), 2))
    engine.close()
    for server in servers:
        server.close()
    return found


def test_both_ranks_get_the_same_of_one_server(tmp_path):
    folder = make_model(tmp_path / "model")
    first, second = on_ranks(works, folder)
    assert (first.pop("devices"), second.pop("devices")) == (["cpu", "cpu"], [])
    assert (first.pop("counted"), second.pop("counted")) == (15, None)
    assert first == second
    module = AutoModelForCausalLM.from_pretrained(folder)
    assert first["digest"] == digest((name, value.detach()) for name, value in module.named_parameters())
    assert [len(tokens) for tokens in first["tokens"]] == [5, 5, 5] and first["progress"] == 15
    assert first["refused"] == "repetition_penalty"
    assert first["pending"] == 1 and first["aborted"] == ("abort", 0)
    assert first["asleep"] == "the server has no weights: none were sent, or sleep dropped them"
    assert first["update"] == "the server refused the request"


def apart(_):
    names = {0: "here", 1: "there"}
    groups.socket.gethostname = lambda: names[dist.get_rank()]

    def start(devices):
        raise AssertionError(devices)

    try:
        GroupEngine(dist.group.WORLD, CPU, start)
    except ConfigError as error:
        return error.got


def fails(_):
    def start(devices):
        raise EngineError("the server ended", got="no memory")

    try:
        GroupEngine(dist.group.WORLD, CPU, start)
    except EngineError as error:
        return error.got


@pytest.mark.parametrize(("ranks", "got"), [(apart, "2, on here, there"), (fails, "no memory")])
def test_a_server_that_cannot_be_shared_or_started_fails_on_both_ranks(ranks, got):
    assert on_ranks(ranks, None) == [got, got]


@pytest.mark.parametrize(("visible", "name"), [(None, "1"), ("4,7", "7"), ("GPU-a, GPU-b", "GPU-b")])
def test_the_server_gets_the_device_of_this_process(monkeypatch, visible, name):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_name(torch.device("cuda", 1)) == name
    assert device_name(CPU) == "cpu"
