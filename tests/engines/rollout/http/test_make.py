"""Tests of the factory that creates engines on servers from the config."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from tandem.config import tables
from tandem.config.rollout import RolloutConfig, ServerConfig
from tandem.engines.rollout.base import WeightStream, generate
from tandem.engines.rollout.http.make import HTTP_ENGINES
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.engines.rollout.http.router import Router
from tandem.engines.rollout.http.sglang import SGLangEngine
from tandem.engines.rollout.registry import make_rollout_engine
from tandem.errors import ConfigError
from tests.engines.rollout.http.fakes import FakeOpenAI
from tests.engines.rollout.http.test_tgi import request, tokenizer

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3/")


def make(name, server, share=(0, 1), log=None, **rollout):
    return make_rollout_engine(
        name,
        RolloutConfig(server=server, **rollout),
        tokenizer=tokenizer(),
        device=torch.device("cpu"),
        max_length=64,
        log=log,
        share=share,
    )


def test_tables():
    assert set(HTTP_ENGINES) == set(tables.SERVER_ENGINES)
    assert {name for name, kind in HTTP_ENGINES.items() if not kind.takes} == {
        *tables.FIXED_WEIGHTS,
        "sglang",
    }


@pytest.mark.parametrize("name", HTTP_ENGINES)
def test_one_server(name):
    server = ServerConfig(urls=URLS[2:], connect_timeout=3.0, request_timeout=60.0, model="m")
    with closing(make(name, server)) as engine:
        assert type(engine) is HTTP_ENGINES[name]
        assert engine.server.url == "http://127.0.0.1:3"
        assert (engine.server.connect_timeout_s, engine.server.request_timeout_s) == (3.0, 60.0)
        assert engine.server.model == "m"


def test_weights_folder(tmp_path):
    with closing(make("sglang", ServerConfig(urls=URLS[:1], weights_folder=str(tmp_path)))) as engine:
        assert isinstance(engine, SGLangEngine)
        assert engine.takes == {WeightStream}


def test_several_servers_are_divided_among_the_workers():
    server = ServerConfig(urls=URLS)
    with closing(make("openai", server)) as engine:
        assert isinstance(engine, Router)
    with closing(make("openai", server, share=(1, 2))) as engine:
        assert isinstance(engine, OpenAIEngine)
        assert engine.server.url == URLS[1]
    with pytest.raises(ConfigError, match="its own server"):
        make("openai", server, share=(3, 4))


def test_api_key(monkeypatch):
    server = ServerConfig(urls=URLS[:1], api_key_env="THE_KEY")
    with pytest.raises(ConfigError, match="not set"):
        make("openai", server)
    monkeypatch.setenv("THE_KEY", "secret")
    with closing(make("openai", server)) as engine:
        assert engine.server.api_key == "secret"


def test_rollout_keys_take_effect(monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.counters._LOG_EVERY_S", 0.0)
    with FakeOpenAI(pause_s=0.005) as fake:
        for silent in (True, False):
            lines: list[str] = []
            config = {"max_num_seqs": 2, "disable_log_stats": silent}
            with closing(
                make("openai", ServerConfig(urls=(fake.url,)), log=lines.append, **config)
            ) as engine:
                generate(engine, [request(length) for length in (2,)])
            assert bool(lines) != silent
