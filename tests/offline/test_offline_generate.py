"""The engine of `tandem generate`: its weights, its closing after errors, and its timeouts."""

from typing import Any

import pytest
import torch

from tandem.cli.main import main
from tandem.config.rollout import RolloutConfig, ServerConfig
from tandem.engines.rollout.base import SharedModule, WeightStream
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.registry import stall_timeout_s
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tandem.offline import generate as offline
from tests.engines.rollout.http.fakes import FakeOpenAI
from tests.support.tiny import make_model, problem, write_rows

SERVED = {"name": "vllm", "mode": "server"}


@pytest.fixture
def words(tmp_path):
    make_model(tmp_path / "model")
    write_rows(tmp_path / "in.parquet", [problem(a, 7) for a in range(3, 6)])
    paths = {"data.path": "in.parquet", "model.path": "model", "data.output_path": "out.parquet"}
    words = [f"{key}={tmp_path / name}" for key, name in paths.items()]
    return ["generate", *words, "data.max_response_length=6", "trainer.device=cpu"]


class Streams(HFEngine):
    """An engine that takes weights into its own module, which `change` then changes."""

    closed = False
    change: Any = staticmethod(lambda module: None)

    def update_weights(self, source, version):
        module = self.model
        for name, tensor in source.tensors:
            dict(module.named_parameters())[name].data.copy_(tensor)
        self.change(module)
        super().update_weights(SharedModule(module), version)
        return digest(module.named_parameters())

    def close(self):
        self.closed = True
        super().close()


@pytest.fixture
def engine(words, tmp_path, monkeypatch):
    made = Streams(device=torch.device("cpu"), max_length=64)
    made.takes = frozenset({WeightStream})
    made.model = offline.load_policy(tmp_path / "model", dtype=torch.bfloat16)  # type: ignore[attr-defined]
    monkeypatch.setattr(offline, "make_rollout_engine", lambda *_, **__: made)
    return made


@pytest.mark.parametrize("factor", [1, 2])
def test_weights_that_do_not_arrive_stop_it(words, engine, tmp_path, capsys, factor):
    engine.change = lambda module: module.model.norm.weight.data.mul_(factor)
    assert main(words) == factor - 1
    assert ("model.norm.weight" in capsys.readouterr().err) == (factor == 2)
    assert engine.closed and (tmp_path / "out.parquet").exists() == (factor == 1)


@pytest.mark.parametrize("error", [EngineError("no room"), KeyboardInterrupt()])
def test_an_engine_whose_weights_cannot_be_loaded_is_closed(words, engine, error, monkeypatch):
    def interrupted(*_, **__):
        raise error

    monkeypatch.setattr(offline, "load_policy", interrupted)
    try:
        assert main(words) != 0
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    assert engine.closed


@pytest.mark.parametrize(
    "changes", [{"name": name} for name in ("native", "vllm", "tgi", "sglang")] + [SERVED]
)
def test_a_hung_server_is_found_before_the_engine_is_given_up(changes):
    """A request may take its whole time on the server that hangs, and again on the next server."""
    rollout = RolloutConfig(server=ServerConfig(urls=("http://a",), request_timeout=90.0), **changes)
    here = changes["name"] in ("native", "vllm") and changes != SERVED
    assert stall_timeout_s(rollout) == (600 if here else 600 + 2 * 90)


def test_generation_has_that_time(words, monkeypatch):
    limits, original = [], offline.finished

    def noted(*args, **options):
        limits.append(options["stall_timeout_s"])
        return original(*args, **options)

    monkeypatch.setattr(offline, "finished", noted)
    with FakeOpenAI() as fake:
        servers = (f"rollout.server.urls=[{fake.url}]", "rollout.server.request_timeout=90.0")
        main([*words, "rollout.name=openai", *servers])
    assert limits == [780]


def test_a_finished_run_may_have_left_its_journal(words, tmp_path, monkeypatch):
    """If a run is killed before it removes the journal, the same command finishes it."""
    work, out = tmp_path / "out.parquet.work.jsonl", tmp_path / "out.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(offline.Journal, "remove", lambda _: None)
        assert main(words) == 0
    assert work.exists()
    before = out.read_bytes()
    assert main(words) == 0 and not work.exists() and out.read_bytes() == before
    assert main(words) == 1  # now the output already exists
