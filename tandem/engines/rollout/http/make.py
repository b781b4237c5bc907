"""Makes an engine on one server, or a router over several, from the config."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.config.rollout import EngineConfig, ServerConfig
from tandem.engines.rollout.base import RolloutEngine
from tandem.engines.rollout.http.client import HTTPEngine
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.engines.rollout.http.router import Router
from tandem.engines.rollout.http.sglang import SGLangEngine
from tandem.engines.rollout.http.shards import WeightsFolder
from tandem.engines.rollout.http.tgi import TGIEngine
from tandem.errors import ConfigError

HTTP_ENGINES: dict[str, Callable[..., HTTPEngine]] = {
    "openai": OpenAIEngine,
    "sglang": SGLangEngine,
    "tgi": TGIEngine,
}
_AHEAD = 1.25  # requests at a server, in those it answers at once: the next wait there


def make_http_engine(
    name: str,
    rollout: EngineConfig,
    common: dict[str, Any],
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    log: Callable[[str], None] | None,
    share: tuple[int, int],
) -> RolloutEngine:
    """Make the engine of that name on the servers of `rollout.server.urls`.

    Args:
        log, share: see `on_servers`.
        common: max_length, max_num_seqs and log, the same for all engines.

    Raises:
        ConfigError: see `on_servers`.
    """
    options: dict[str, Any] = {"vocabulary": None if tokenizer is None else len(tokenizer)}
    if name == "tgi":
        options["tokenizer"] = tokenizer
    if name == "sglang" and rollout.server.weights_folder is not None:
        options["weights_folder"] = WeightsFolder(Path(rollout.server.weights_folder))
    return on_servers(rollout, partial(HTTP_ENGINES[name], **options, **common), log=log, share=share)


def on_servers(
    rollout: EngineConfig,
    make: Callable[[Server], HTTPEngine],
    *,
    log: Callable[[str], None] | None,
    share: tuple[int, int],
) -> RolloutEngine:
    """Make one engine, or a router over several, on this worker's share of `rollout.server.urls`.

    Args:
        log: is told when a server is lost.
        share: (number, count) of the workers that divide the servers among themselves; this one has each
            `count`-th, from its number on.

    Raises:
        ConfigError: fewer servers than workers, an API key that is not in the environment.
    """
    number, count = share
    urls = rollout.server.urls[number::count]
    if not urls:
        raise ConfigError(
            "each worker that generates needs a server of its own",
            field="rollout.server.urls",
            got=f"{len(rollout.server.urls)} servers",
            expected=f"at least {count}",
            remedy="start more servers, or place the rollout on fewer devices",
        )
    engines = [make(_server(url, rollout.server)) for url in urls]
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


def _server(url: str, config: ServerConfig) -> Server:
    api_key = None
    if config.api_key_env is not None:
        api_key = os.environ.get(config.api_key_env)
        if not api_key:
            raise ConfigError(
                "the environment variable with the servers' key is not set",
                field="rollout.server.api_key_env",
                got=config.api_key_env,
                remedy=f"export {config.api_key_env}=…, or remove this key",
            )
    return Server(
        url=url.rstrip("/"),
        connect_timeout_s=config.connect_timeout,
        request_timeout_s=config.request_timeout,
        model=config.model,
        api_key=api_key,
    )
