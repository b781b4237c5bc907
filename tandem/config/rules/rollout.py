"""Rules about rollouts: engines on servers, log-probs that training can use, the reference's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.config.generate import EvalConfig, GenerateConfig
from tandem.config.needs import Check
from tandem.config.rollout import EngineConfig
from tandem.config.root import TrainConfig
from tandem.config.section import Finding
from tandem.config.tables import FIXED_WEIGHTS, SERVER_ENGINES
from tandem.config.view import path
from tandem.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"
_TEMPERATURE = f"{_ROLLOUT}.temperature"


def servers(config: TrainConfig | GenerateConfig | EvalConfig) -> Iterator[ConfigError]:
    """Check that an engine on servers has addresses and returns the requested log-probs.

    The engines vllm and sglang need no addresses, because their workers can start servers.
    """
    rollout = config.actor_rollout_ref.rollout if isinstance(config, TrainConfig) else config.rollout
    engine, addresses = rollout.name, rollout.server.urls
    name, urls = path(rollout, "name"), path(rollout, "server.urls")
    if engine not in SERVER_ENGINES and not (engine == "vllm" and addresses):
        return
    if not addresses and engine != "sglang":
        remedy = f"set {urls}=[http://host:port], one per server; or use {name}=vllm, sglang or native, "
        remedy += "which need none"
        yield ConfigError("missing", field=urls, expected="addresses of servers", remedy=remedy)
    for url in addresses:
        if not url.startswith(("http://", "https://")):
            yield ConfigError("this is not a valid address", field=urls, got=url, expected="http://host:port")
    if rollout.logprobs_mode != "processed_logprobs":
        yield ConfigError(
            "servers can only return the log-probs of the distribution that tokens are sampled from",
            field=path(rollout, "logprobs_mode"),
            expected="processed_logprobs",
            remedy=f"remove this key, or set {name}=native",
        )


def one_device(config: GenerateConfig | EvalConfig) -> Iterator[Finding]:
    """Check `splitting` for a command that uses one device."""
    return splitting(config.rollout, engines=())


def splitting(rollout: EngineConfig, *, engines: Sequence[str]) -> Iterator[Finding]:
    """Check that the rollout engine supports splitting its layers over devices, if the config requests it.

    Args:
        rollout: the rollout section.
        engines: the engines that can split their layers.
    """
    size, field = rollout.tensor_model_parallel_size, path(rollout, "tensor_model_parallel_size")
    if size == 1:
        return
    if rollout.on_named_servers:
        yield f"{field}={size}: no effect; a server uses the devices that it was started with."
    elif rollout.name not in engines:
        yield ConfigError(
            f"the engine rollout.name={rollout.name} keeps each layer on one device",
            field=field,
            expected="1; additional devices generate other samples" if engines else "1",
            remedy=f"set {field}=1" + (f", or {path(rollout, 'name')}=native" if engines else ""),
        )
    elif rollout.name == "vllm" and rollout.on_servers:
        yield ConfigError(
            "a vLLM server started by a worker keeps each layer on one device",
            field=field,
            expected="1; additional devices generate other samples",
            remedy=f"set {path(rollout, 'mode')}=colocate, so that the workers split the layers, or set "
            f"{path(rollout, 'server.urls')} to the addresses of servers",
        )


TRAINS = (
    Check(
        lambda config, engine: engine in FIXED_WEIGHTS and not config.trainer.val_only,
        "this engine cannot receive new weights, which training needs",
        field=f"{_ROLLOUT}.name",
        expected="native, hf, vllm or sglang",
        remedy="set {}=native, or trainer.val_only=true, or use this engine with `tandem generate`",
    ),
    Check(
        lambda config, mode: mode.endswith("logits"),
        "training needs log-probs, not logits",
        field=f"{_ROLLOUT}.logprobs_mode",
        remedy="set {}=processed_logprobs",
    ),
    Check(  # with temperature 1, raw log-probs equal those of softmax(logits / temperature)
        lambda config, mode: mode == "raw_logprobs" and config.actor_rollout_ref.rollout.temperature != 1,
        "raw log-probs ignore the temperature, but training divides the logits by it",
        field=f"{_ROLLOUT}.logprobs_mode",
        got=f"{{=}} with {{{_TEMPERATURE}=}}",
        remedy=f"set {{}}=processed_logprobs, or {_TEMPERATURE}=1.0",
    ),
    Check(
        lambda config, rank: rank > 0 and config.needs_reference and not config.reference_is_the_actor,
        "{}: the reference policy runs in a different place than the actor, so the base weights are loaded "
        "twice; if both share a pool, they are loaded once.",
        field="actor_rollout_ref.model.lora_rank",
        notice=True,
    ),
)
"""Rules about rollouts of training runs."""
