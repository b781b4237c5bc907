"""Rules of rollout engines that run on servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.config.rule import Rule
from tandem.config.schema import value_at
from tandem.config.section import Section
from tandem.config.tables import FIXED_WEIGHTS, SERVER_ENGINES
from tandem.errors import ConfigError


def servers(at: str, *, training: bool) -> Rule[Any]:
    """An engine on servers has addresses (vllm may start one of its own), gives the log-probs that are asked
    for and, in training, takes new weights.

    Args:
        at: path of the rollout section.
    """
    name, urls, folder = f"{at}.name", f"{at}.server.urls", f"{at}.server.weights_folder"
    mode = f"{at}.logprobs_mode"
    only_validates = "trainer.val_only"

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        engine = value_at(config, name)
        if engine not in SERVER_ENGINES and not (engine == "vllm" and value_at(config, urls)):
            return
        if not value_at(config, urls):
            remedy = f"set {urls}=[http://host:port], one for each server"
            yield ConfigError("missing", field=urls, expected="addresses of servers", remedy=remedy)
        for url in value_at(config, urls):
            if not url.startswith(("http://", "https://")):
                yield ConfigError("not an address", field=urls, got=url, expected="http://host:port")
        if value_at(config, mode) != "processed_logprobs":
            yield ConfigError(
                "servers are asked for the log-probs of the distribution sampled from",
                field=mode,
                got=value_at(config, mode),
                expected="processed_logprobs",
                remedy=f"remove this key, or set {name}=native",
            )
        if not training or value_at(config, only_validates):
            return
        if engine in FIXED_WEIGHTS:
            yield ConfigError(
                "this engine cannot be given new weights, and training needs one that can",
                field=name,
                got=engine,
                expected="native, hf, vllm or sglang",
                remedy=f"set {name}=native, or trainer.val_only=true, or use it with `tandem generate`",
            )
        elif engine != "vllm" and value_at(config, folder) is None:
            yield ConfigError(
                "missing",
                field=folder,
                expected="a folder that this run and the servers see under the same path",
                remedy=f"set {folder}: new weights go to the servers through it",
            )

    return Rule((name, urls, folder, mode, *([only_validates] if training else [])), check)
