"""New weights of real SGLang servers, in each way that they get there; see `make test-sglang`."""

import hashlib
from contextlib import closing

import pytest
from transformers import AutoConfig

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.http.channel import Network
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.shards import WeightsFolder
from tandem.engines.rollout.sglang.engine import SGLangEngine
from tandem.engines.rollout.sglang.workers import SharedMemoryChannel
from tandem.engines.weight_sync import WeightSyncError, digest
from tests.contract import world as worlds
from tests.contract.rollout import GREEDY
from tests.contract.world import EngineKind, check_sample, requests_of
from tests.engines.rollout.case import CPU, changed, stream
from tests.engines.rollout.sglang.fake_sglang import joined
from tests.engines.rollout.sglang.semantics import sglang_distribution
from tests.engines.rollout.sglang.serving import start

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
KIND = EngineKind("sglang", None, stream, keyed=False, untruncated=False, distribution=sglang_distribution)
WAYS = {
    "shared memory": lambda server, _: {"process": server},
    "network": lambda *_: {"weights": Network(CPU)},
    "folder": lambda _, folder: {"weights": WeightsFolder(folder)},
}


class Lent:
    """A server that stays when its engine is closed."""

    def __init__(self, process):
        self.url, self.check = process.url, process.check

    def close(self): ...


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    new_module().save_pretrained(folder)
    return folder


def new_module():
    return worlds.make_model(11, num_key_value_heads=2)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(request, model, tmp_path_factory):
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    process = start(AutoConfig.from_pretrained(model), log, devices=["cpu"] * request.param)
    yield Lent(process)
    process.close()


def engine_on(server, model, **options):
    config = AutoConfig.from_pretrained(model)
    return closing(SGLangEngine(Server(server.url), config=config, max_length=96, **options))


def held_by(engine):
    """Return the checksums that the server's first rank reports."""
    ranks = engine.call("POST", "/weights_checker", json={"action": "checksum"})["ranks"]
    return next(rank["checksums"] for rank in ranks if rank["parallelism_info"][0]["tp_rank"] == 0)


@pytest.mark.parametrize("way", WAYS)
def test_ten_updates(server, model, way, tmp_path):
    """The engine itself compares the checksums of all ranks after each update."""
    module = new_module()
    with engine_on(server, model, bucket_bytes=20_000, **WAYS[way](server, tmp_path)) as engine:
        for version in range(1, 11):
            changed(module, version)
            weights = {name: value.detach() for name, value in module.named_parameters()}
            assert engine.update_weights(stream(module), version) == digest(weights.items())
            if engine._ranks == 1:
                sums = {n: hashlib.sha256(w.numpy().tobytes()).hexdigest()[:16] for n, w in joined(weights)}
                assert held_by(engine) == sums
        (asked,) = requests_of(GREEDY, 1)
        (sample,) = generate(engine, [asked])
        check_sample(KIND, module, asked, sample)
        assert set(sample.versions.tolist()) == {10}


def test_a_weight_that_arrives_damaged_is_named(server, model, monkeypatch):
    sent, send = [], SharedMemoryChannel.send

    def damaged(channel, used, layout):
        if not sent:
            channel._bucket[layout[0][3]] ^= 1
        sent.append(layout[0][0])
        send(channel, used, layout)

    monkeypatch.setattr(SharedMemoryChannel, "send", damaged)
    module = new_module()
    with engine_on(server, model, process=server) as engine:
        with pytest.raises(WeightSyncError, match="1 weights of version 1") as caught:
            engine.update_weights(stream(module), 1)
        assert caught.value.field == sent[0] and not engine.has_weights
        engine.update_weights(stream(module), 2)
        assert engine.has_weights
