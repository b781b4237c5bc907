"""Rules of rollouts: engines on servers, log-probs that training can use, the reference's weights."""

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
    """An engine on servers has addresses (vllm may start one of its own), and gives the log-probs that are
    asked for."""
    rollout = config.actor_rollout_ref.rollout if isinstance(config, TrainConfig) else config.rollout
    engine, addresses = rollout.name, rollout.server.urls
    name, urls = path(rollout, "name"), path(rollout, "server.urls")
    if engine not in SERVER_ENGINES and not (engine == "vllm" and addresses):
        return
    if not addresses:
        remedy = (
            f"set {urls}=[http://host:port], one for each server; or {name}=vllm or native, which need none"
        )
        yield ConfigError("missing", field=urls, expected="addresses of servers", remedy=remedy)
    for url in addresses:
        if not url.startswith(("http://", "https://")):
            yield ConfigError("not an address", field=urls, got=url, expected="http://host:port")
    if rollout.logprobs_mode != "processed_logprobs":
        yield ConfigError(
            "servers are asked for the log-probs of the distribution sampled from",
            field=path(rollout, "logprobs_mode"),
            expected="processed_logprobs",
            remedy=f"remove this key, or set {name}=native",
        )


def one_device(config: GenerateConfig | EvalConfig) -> Iterator[Finding]:
    """`splitting` of a command that has one device."""
    return splitting(config.rollout, engines=())


def splitting(rollout: EngineConfig, *, engines: Sequence[str]) -> Iterator[Finding]:
    """Layers of the rollout engine are split over devices where it can do so.

    Args:
        engines: those that can.
    """
    size, field = rollout.tensor_model_parallel_size, path(rollout, "tensor_model_parallel_size")
    if size == 1:
        return
    if rollout.on_named_servers:
        yield f"{field}={size}: no effect; a server has the devices that it was started with."
    elif rollout.name not in engines:
        yield ConfigError(
            f"this build keeps each layer of rollout.name={rollout.name} on one device",
            field=field,
            expected="1; further devices take further samples" if engines else "1",
            remedy=f"set {field}=1" + (f", or {path(rollout, 'name')}=native" if engines else ""),
        )
    elif rollout.name == "vllm" and rollout.mode == "server":
        yield ConfigError(
            "a vLLM server that a worker starts keeps each layer on one device",
            field=field,
            expected="1; further devices take further samples",
            remedy=f"set {path(rollout, 'mode')}=colocate, where the workers split the layers among them, or "
            f"name servers with {path(rollout, 'server.urls')}",
        )


TRAINS = (
    Check(
        lambda config, engine: engine in FIXED_WEIGHTS and not config.trainer.val_only,
        "this engine cannot be given new weights, and training needs one that can",
        field=f"{_ROLLOUT}.name",
        expected="native, hf, vllm or sglang",
        remedy="set {}=native, or trainer.val_only=true, or use it with `tandem generate`",
    ),
    Check(
        lambda config, folder: (
            folder is None
            and config.actor_rollout_ref.rollout.name == "sglang"
            and not config.trainer.val_only
        ),
        "missing",
        field=f"{_ROLLOUT}.server.weights_folder",
        expected="a folder that this run and the servers see under the same path",
        remedy="set {}: new weights go to the servers through it",
    ),
    Check(
        lambda config, mode: mode.endswith("logits"),
        "training needs log-probs, not logits",
        field=f"{_ROLLOUT}.logprobs_mode",
        remedy="set {}=processed_logprobs",
    ),
    Check(  # raw ones are those under softmax(logits / temperature) where the temperature is 1
        lambda config, mode: mode == "raw_logprobs" and config.actor_rollout_ref.rollout.temperature != 1,
        "raw log-probs leave out the temperature, by which training divides the logits",
        field=f"{_ROLLOUT}.logprobs_mode",
        got=f"{{=}} with {{{_TEMPERATURE}=}}",
        remedy=f"set {{}}=processed_logprobs, or {_TEMPERATURE}=1.0",
    ),
    Check(
        lambda config, rank: rank > 0 and config.needs_reference and not config.reference_is_the_actor,
        "{}: the reference policy is placed apart and holds the base weights a second time; placed with the "
        "actor it needs none of its own.",
        field="actor_rollout_ref.model.lora_rank",
        notice=True,
    ),
)
"""Rules of a rollout whose samples are learnt from, as rows."""
