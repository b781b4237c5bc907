import copy
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tandem.engines.rollout.base import WeightStream, generate
from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http import shards
from tandem.engines.rollout.http.channel import Network
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.router import Router
from tandem.engines.rollout.http.shards import WeightsFolder, write_shards
from tandem.engines.rollout.sglang.engine import SGLangEngine
from tandem.engines.weight_sync import WeightSyncError, digest
from tandem.errors import EngineError
from tests.contract.rollout import GREEDY, RolloutContract
from tests.contract.world import VOCABULARY, EngineKind, logits_of, requests_of
from tests.engines.rollout.case import CPU, changed, drain, request, stream, write
from tests.engines.rollout.http.fakes import Reply
from tests.engines.rollout.sglang.fake_sglang import FakeSGLang
from tests.engines.rollout.sglang.semantics import sglang_distribution
from tests.support.refusing import refused


def make(server, weights=None, **options):
    weights = WeightsFolder(weights) if isinstance(weights, Path) else weights
    options = {"config": server.module.config, "max_length": 96, "weights": weights, **options}
    return SGLangEngine(Server(server.url), **options)


class Running:
    """A process that stands for the server's, so that weights go through shared memory."""

    def check(self, within_s=0.0): ...

    def close(self): ...


@pytest.mark.slow
class TestSGLang(RolloutContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls, tmp_path_factory):
        servers = []

        def make_one(world, **options):
            servers.append(FakeSGLang(copy.deepcopy(world.module), decode=world.decode))
            return make(servers[-1], tmp_path_factory.mktemp("weights"), vocabulary=VOCABULARY, **options)

        options = {"keyed": False, "recomputes": None, "untruncated": False, "modes": ()}
        yield EngineKind("sglang", make_one, stream, **options, distribution=sglang_distribution)
        for server in servers:
            server.close()

    test_stats_count_and_start_anew_and_progress_goes_on = None  # the server does not report its decode steps

    def test_a_stop_string_ends_and_is_kept(self, world, engine):
        (long,) = generate(engine, requests_of(GREEDY, 1))
        text = world.decode(long.token_ids[5:8].tolist())
        (short,) = generate(engine, requests_of(replace(GREEDY, stop=(text,)), 1))
        assert short.finish_reason == "stop"
        assert short.token_ids.tolist() == long.token_ids[: len(short.token_ids)].tolist()
        assert world.decode(short.token_ids.tolist()).endswith(text)
        with pytest.raises(EngineError, match="before min_tokens"):
            engine.submit(requests_of(replace(GREEDY, stop=(text,), min_tokens=2), 1))


@pytest.fixture
def server(tiny):
    with FakeSGLang(tiny()) as fake:
        yield fake


CHANNELS = {
    "folder": lambda folder: {"weights": folder},
    "network": lambda _: {"weights": Network(CPU)},
    "shared memory": lambda _: {"process": Running()},
}


@pytest.fixture(params=["folder"])
def engine(server, tmp_path, request):
    made = make(server, bucket_bytes=20_000, **CHANNELS[request.param](tmp_path / "weights"))
    yield made
    made.close()


through_each_channel = pytest.mark.parametrize("engine", CHANNELS, indirect=True)


def test_the_whole_request_on_the_wire(server, engine):
    params = {"temperature": 0.0, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    params["frequency_penalty"] = -0.4
    others = {
        "top_k": 0,
        "max_tokens": 4,
        "min_tokens": 2,
        "stop_token_ids": (3, 4),
        "logit_bias": ((7, 1.5),),
    }
    wanted = request("u", 1, [5, 6, 7], **params, **others, seed=5)
    generate(engine, [wanted])
    (body,) = server.bodies()
    assert len(body.pop("rid")) > 20
    renamed = {"max_new_tokens": 4, "min_new_tokens": 2, "sampling_seed": seed_of(wanted)}
    others = {"stop_token_ids": [3, 4], "logit_bias": {"7": 1.5}, "ignore_eos": False, "stream_interval": 16}
    assert body.pop("sampling_params") == params | renamed | others
    flags = {"return_logprob": True, "return_sampling_mask": False, "stream": True}
    assert body == {"input_ids": [5, 6, 7], **flags}


@pytest.mark.parametrize("cumulative", [True, False])
def test_log_probs_before_and_after_truncation(server, engine, tiny, make_requests, cumulative):
    server.cumulative, requests = cumulative, make_requests(4, 2, top_k=3, temperature=0.8)
    for asked, sample in zip(requests, generate(engine, requests), strict=True):
        logits = torch.from_numpy(logits_of(tiny(), asked, sample.token_ids)) / 0.8
        chosen = torch.from_numpy(sample.token_ids)[:, None]
        whole = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
        cut = (logits.gather(1, chosen)[:, 0] - logits.topk(3).values.logsumexp(-1)).numpy()
        np.testing.assert_allclose(sample.untruncated_log_probs, whole, atol=1e-4)
        np.testing.assert_allclose(sample.log_probs, cut, atol=1e-4)


@pytest.mark.parametrize(
    ("params", "top_k", "masked"),
    [
        ({"top_k": 1_000_000}, None, False),
        ({"top_k": 1_000_000, "top_p": 0.9}, VOCABULARY, True),
        ({"top_p": 0.9}, VOCABULARY, True),
        ({"min_p": 0.1, "top_k": 5}, 5, True),
        ({"temperature": 0.0, "top_p": 0.9}, None, False),
        ({}, None, False),
    ],
)
def test_a_mask_is_requested_for_distributions_that_are_cut(server, engine, params, top_k, masked):
    generate(engine, [request("u", 0, [5, 6], max_tokens=2, **params)])
    (body,) = server.bodies()
    assert (body["sampling_params"].get("top_k"), body["return_sampling_mask"]) == (top_k, masked)
    assert body["sampling_params"]["ignore_eos"] is True  # no stop token is requested


def test_a_distribution_that_the_server_cannot_report_is_refused(server, engine):
    server.mask_limit = 50
    error = refused(EngineError, lambda: engine.submit([request(max_tokens=2, top_p=0.9)]))
    assert error.field == "top_k" and f"--sampling-mask-max-tokens {VOCABULARY}" in error.remedy
    assert len(generate(engine, [request(max_tokens=2, top_p=0.9, top_k=50)])) == 1


@pytest.mark.slow
@through_each_channel
def test_ten_updates_arrive_and_leave_no_files(server, engine, tiny, tmp_path):
    assert engine.takes == {WeightStream}
    for version in range(1, 11):
        other = changed(tiny(), version)
        assert engine.update_weights(stream(other), version) == digest(other.named_parameters())
        assert digest(server.module.named_parameters()) == digest(other.named_parameters())
    assert server.version == "10" and not server.session
    assert list(tmp_path.glob("weights/*")) == []
    (sample,) = generate(engine, [request(max_tokens=3)])
    assert sample.versions.tolist() == [10, 10, 10]
    assert len(server.groups) <= 1  # one process group serves all updates


@through_each_channel
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.qkv_proj.weight"])
def test_a_weight_that_the_server_does_not_hold_is_named(server, engine, tiny, name):
    server.damage = lambda each, tensor: tensor + (each == name)
    error = refused(WeightSyncError, lambda: engine.update_weights(stream(tiny()), 4), "of version 4")
    assert error.field == name and server.url in error.got
    refused(EngineError, lambda: engine.submit([request()]), "no weights")
    server.damage = lambda _, tensor: tensor
    engine.update_weights(stream(tiny()), 5)
    assert len(generate(engine, [request(max_tokens=2)])) == 1


def test_several_servers_read_the_same_files(tiny, tmp_path, monkeypatch):
    written, original = [], shards.write_shards
    monkeypatch.setattr(shards, "write_shards", lambda *args: (written.append(args[1]), original(*args))[1])
    folder = WeightsFolder(tmp_path)
    with FakeSGLang(tiny()) as one, FakeSGLang(tiny()) as two, FakeSGLang(tiny()) as three:
        fakes = (one, two, three)
        router = Router([make(f, weights=folder) for f in fakes], max_length=96, window=8)
        for version in (1, 2):
            new = changed(tiny(), version)
            expected = digest(new.named_parameters())
            assert router.update_weights(stream(new), version) == expected and len(written) == version
            for fake in fakes:
                assert fake.bodies("/update_weights_from_disk")[-1]["model_path"] == str(written[-1])
                assert digest(fake.module.named_parameters()) == expected
        assert list(tmp_path.iterdir()) == []
        router.close()


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    ended, host = subprocess.Popen([sys.executable, "-c", ""]), socket.gethostname()
    ended.wait(30)
    stays = {
        f"version_00000001_{host}_{ended.pid}_ab": False, f"version_00000001_{host}_{os.getpid()}_ab": True,
        f"version_00000001_another-{host}_{ended.pid}_ab": True, "mine": True,
    }  # fmt: skip
    for name in stays:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    WeightsFolder(tmp_path)
    assert {name: (tmp_path / name).exists() for name in stays} == stays


@pytest.mark.parametrize("hangs", [False, True])
def test_abort_is_said_to_the_server_and_does_not_wait_for_one_that_hangs(server, engine, monkeypatch, hangs):
    monkeypatch.setattr("tandem.engines.rollout.http.client.CLOSING_S", 0.3)
    server.pause_s = 0.02
    requests = [request("u", i, max_tokens=80) for i in range(3)]
    engine.submit(requests)
    write(engine, 17)
    if hangs:
        monkeypatch.setattr(server, "_abort_request", lambda _: (server._closing.wait(60), Reply())[1])
    began = time.monotonic()
    partial = engine.abort([each.id for each in requests[:2]], keep_partial=True)
    assert time.monotonic() - began < 5
    assert max(len(sample.token_ids) for sample in partial) >= 16
    assert engine.pending() == 1
    said = [body["rid"] for body in server.bodies("/abort_request")]
    assert len(said) == 2 and set(said) < {body["rid"] for body in server.bodies()}


def test_weights_in_the_middle_of_a_response(server, engine, tiny):
    server.pause_s = 0.01
    engine.update_weights(stream(tiny()), 1)
    engine.submit([request(max_tokens=60)])
    write(engine, 16)
    engine.update_weights(stream(tiny()), 2)
    versions = drain(engine)["a", 0].versions.tolist()
    assert versions == sorted(versions)
    assert versions[:16] == [1] * 16 and versions[-8:] == [2] * 8


def test_a_refused_update(server, engine, tiny, tmp_path):
    server.refusal = "Failed to update weights: size mismatch."
    error = refused(EngineError, lambda: engine.update_weights(stream(tiny()), 1), "refused")
    assert "size mismatch" in error.got
    assert server.seen[-1][0] == "/continue_generation"
    assert list((tmp_path / "weights").iterdir()) == []
    assert engine.version == 0


def test_without_a_folder_there_are_no_new_weights_and_another_server_is_refused(server, tiny):
    engine = make(server)
    assert engine.takes == frozenset()
    message = "cannot give its server new weights"
    refused(EngineError, lambda: engine.update_weights(stream(tiny()), 1), message)
    server._model_info = lambda _: Reply({"detail": "Not Found"}, 404)
    refused(EngineError, lambda: engine.submit([request()]), "refused")
    engine.close()


def test_memory_is_given_back_and_taken_again(server, engine, tiny):
    engine.sleep(("kv_cache",))
    engine.sleep()
    assert server.memory == set()
    given = [body["tags"] for body in server.bodies("/release_memory_occupation")]
    assert given == [["kv_cache"], ["weights"]]
    engine.wake()
    assert server.memory == {"weights", "kv_cache"}
    refused(EngineError, lambda: engine.submit([request()]), "dropped")
    engine.sleep()
    engine.update_weights(stream(tiny()), 1)
    assert server.memory == {"weights"}
    assert len(generate(engine, [request(max_tokens=3)])[0].token_ids) == 3


def test_shards(tmp_path):
    tensors = [(f"t{i}", torch.randn(16, 16, dtype=torch.bfloat16)) for i in range(5)]
    reused = torch.empty(16, 16, dtype=torch.bfloat16)
    valid_until_the_next = ((name, reused.copy_(tensor)) for name, tensor in tensors)
    assert write_shards(valid_until_the_next, tmp_path, shard_bytes=1024) == digest(tensors)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 3
    read = {name: value for file in files for name, value in load_file(file).items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors)
