from contextlib import closing

import pytest

from tandem.config import tables
from tandem.config.rollout import RolloutConfig, ServerConfig
from tandem.engines.rollout.base import generate
from tandem.engines.rollout.http.make import HTTP_ENGINES
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.engines.rollout.http.router import Router
from tandem.engines.rollout.registry import make_rollout_engine
from tandem.errors import ConfigError
from tests.engines.rollout.case import CPU, request
from tests.engines.rollout.http.fakes import FakeOpenAI
from tests.engines.rollout.http.test_tgi import tokenizer
from tests.support.refusing import refused

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3/")


def make(name, urls, share=(0, 1), log=None, rollout=None, **server):
    config = RolloutConfig(server=ServerConfig(urls=urls, **server), **(rollout or {}))
    options = {"tokenizer": tokenizer(), "device": CPU, "max_length": 64, "log": log, "share": share}
    return closing(make_rollout_engine(name, config, **options))


def test_tables():
    assert set(HTTP_ENGINES) == set(tables.SERVER_ENGINES) - {"sglang"}
    fixed = {name for name, kind in HTTP_ENGINES.items() if not kind.takes}
    assert fixed == set(tables.FIXED_WEIGHTS)


@pytest.mark.parametrize("name", HTTP_ENGINES)
def test_one_server(name, monkeypatch):
    options = {"connect_timeout": 3.0, "request_timeout": 60.0, "model": "m", "api_key_env": "THE_KEY"}
    refused(ConfigError, lambda: make(name, URLS[2:], **options), "not set")
    monkeypatch.setenv("THE_KEY", "secret")
    with make(name, URLS[2:], **options) as engine:
        assert type(engine) is HTTP_ENGINES[name]
        server = engine.server
        assert (server.url, server.model, server.api_key) == ("http://127.0.0.1:3", "m", "secret")
        assert (server.connect_timeout_s, server.request_timeout_s) == (3.0, 60.0)


def test_several_servers_are_divided_among_the_workers():
    with make("openai", URLS) as engine:
        assert isinstance(engine, Router)
    with make("openai", URLS, share=(1, 2)) as engine:
        assert isinstance(engine, OpenAIEngine) and engine.server.url == URLS[1]
    refused(ConfigError, lambda: make("openai", URLS, share=(3, 4)), "its own server")


@pytest.mark.parametrize("silent", [True, False])
def test_log_lines_and_max_num_seqs(monkeypatch, silent):
    monkeypatch.setattr("tandem.engines.rollout.counters._LOG_EVERY_S", 0.0)
    lines, rollout = [], {"max_num_seqs": 2, "disable_log_stats": silent}
    with (
        FakeOpenAI(pause_s=0.005) as fake,
        make("openai", (fake.url,), log=lines.append, rollout=rollout) as engine,
    ):
        generate(engine, [request(str(i), max_tokens=6) for i in range(4)])
        assert engine.stats()["peak_running"] == 2
    assert silent == (not lines) and (silent or "tokens/s" in lines[-1])
