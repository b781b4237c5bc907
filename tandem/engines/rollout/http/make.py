"""A factory that creates an engine on one server, or a router over several, from the config."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.config.rollout import EngineConfig
from tandem.engines.rollout.base import RolloutEngine
from tandem.engines.rollout.http.client import HTTPEngine
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.engines.rollout.http.router import Router
from tandem.engines.rollout.http.tgi import TGIEngine
from tandem.errors import ConfigError

HTTP_ENGINES: dict[str, Callable[..., HTTPEngine]] = {
    "openai": OpenAIEngine,
    "tgi": TGIEngine,
}
_AHEAD = 1.25  # requests sent to a server / requests that it runs at once; the server queues the others


def http_options(name: str, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Return the keyword arguments that only the engine with this name accepts."""
    options: dict[str, Any] = {"vocabulary": None if tokenizer is None else len(tokenizer)}
    if name == "tgi":
        options["tokenizer"] = tokenizer
    return options


def on_servers(
    rollout: EngineConfig,
    make: Callable[[Server], HTTPEngine],
    *,
    log: Callable[[str], None] | None,
    share: tuple[int, int],
) -> RolloutEngine:
    """Create an engine, or a router over several engines, for this worker's servers.

    Args:
        rollout: The config of the engine.
        make: A function that creates the engine of one server.
        log: A function that receives a message when a server is lost.
        share: (number of this worker, count of workers). The workers divide the servers `rollout.server.urls`
            among themselves: this worker gets every `count`-th server, starting at its number.

    Raises:
        ConfigError: There are fewer servers than workers, or the API key is not in the environment.
    """
    number, count = share
    config = rollout.server
    urls = config.urls[number::count]
    if not urls:
        raise ConfigError(
            "each worker that generates needs its own server",
            field="rollout.server.urls",
            got=f"{len(config.urls)} servers",
            expected=f"at least {count}",
            remedy="start more servers, or place the rollout on fewer devices",
        )
    api_key = None if config.api_key_env is None else os.environ.get(config.api_key_env)
    if config.api_key_env is not None and not api_key:
        raise ConfigError(
            "the environment variable with the servers' API key is not set",
            field="rollout.server.api_key_env",
            got=config.api_key_env,
            remedy=f"export {config.api_key_env}=…, or remove this key",
        )
    limits = (config.connect_timeout, config.request_timeout)
    engines = [make(Server(url.rstrip("/"), *limits, config.model, api_key)) for url in urls]
    if len(engines) == 1:
        return engines[0]
    return Router(
        engines,
        max_length=engines[0].max_length,
        window=int(_AHEAD * rollout.max_num_seqs),
        vocabulary=engines[0].vocabulary,
        names=urls,
        log=log,
    )
