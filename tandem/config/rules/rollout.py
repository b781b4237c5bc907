"""Rules of rollouts: engines on servers, log-probs that training can use, the reference's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.config.generate import EvalConfig, GenerateConfig
from tandem.config.rollout import EngineConfig
from tandem.config.root import TrainConfig
from tandem.config.section import Finding
from tandem.config.tables import FIXED_WEIGHTS, SERVER_ENGINES
from tandem.errors import ConfigError


def train_servers(config: TrainConfig) -> Iterator[ConfigError]:
    """`servers` of `tandem train`."""
    trains = not config.trainer.val_only
    yield from servers(config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout", training=trains)


def offline_servers(config: GenerateConfig | EvalConfig) -> Iterator[ConfigError]:
    """`servers` of a command that does not train."""
    return servers(config.rollout, "rollout", training=False)


def servers(rollout: EngineConfig, at: str, *, training: bool) -> Iterator[ConfigError]:
    """An engine on servers has addresses (vllm may start one of its own), gives the log-probs that are asked
    for and, in training, takes new weights.

    Args:
        at: path of the rollout section.
    """
    engine, addresses = rollout.name, rollout.server.urls
    name, urls, folder = f"{at}.name", f"{at}.server.urls", f"{at}.server.weights_folder"
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
            field=f"{at}.logprobs_mode",
            expected="processed_logprobs",
            remedy=f"remove this key, or set {name}=native",
        )
    if training and engine in FIXED_WEIGHTS:
        yield ConfigError(
            "this engine cannot be given new weights, and training needs one that can",
            field=name,
            expected="native, hf, vllm or sglang",
            remedy=f"set {name}=native, or trainer.val_only=true, or use it with `tandem generate`",
        )
    elif training and engine != "vllm" and rollout.server.weights_folder is None:
        yield ConfigError(
            "missing",
            field=folder,
            expected="a folder that this run and the servers see under the same path",
            remedy=f"set {folder}: new weights go to the servers through it",
        )


def one_device(config: GenerateConfig | EvalConfig) -> Iterator[Finding]:
    """`splitting` of a command that has one device."""
    return splitting(config.rollout, "rollout", engines=())


def splitting(rollout: EngineConfig, at: str, *, engines: Sequence[str]) -> Iterator[Finding]:
    """Layers of the rollout engine are split over devices where it can do so.

    Args:
        at: path of the rollout section.
        engines: those that can.
    """
    size, field = rollout.tensor_model_parallel_size, f"{at}.tensor_model_parallel_size"
    if size == 1:
        return
    if rollout.on_named_servers:
        yield f"{field}={size}: no effect; a server has the devices that it was started with."
    elif rollout.name not in engines:
        yield ConfigError(
            f"this build keeps each layer of rollout.name={rollout.name} on one device",
            field=field,
            expected="1; further devices take further samples" if engines else "1",
            remedy=f"set {field}=1" + (f", or {at}.name=native" if engines else ""),
        )
    elif rollout.name == "vllm" and rollout.mode == "server":
        yield ConfigError(
            "a vLLM server that a worker starts keeps each layer on one device",
            field=field,
            expected="1; further devices take further samples",
            remedy=f"set {at}.mode=colocate, where the workers split the layers among them, or name servers "
            f"with {at}.server.urls",
        )


def log_probs(config: TrainConfig) -> Iterator[ConfigError]:
    """Training needs log-probs under the distribution sampled from, or under the one it computes itself,
    softmax(logits / temperature); raw ones are the latter's where the temperature is 1."""
    rollout, field = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.logprobs_mode"
    remedy = f"set {field}=processed_logprobs"
    if rollout.logprobs_mode.endswith("logits"):
        yield ConfigError("training needs log-probs, not logits", field=field, remedy=remedy)
    elif rollout.logprobs_mode == "raw_logprobs" and rollout.temperature != 1:
        yield ConfigError(
            "raw log-probs leave out the temperature, by which training divides the logits",
            field=field,
            got=f"raw_logprobs with actor_rollout_ref.rollout.temperature={rollout.temperature}",
            remedy=f"{remedy}, or actor_rollout_ref.rollout.temperature=1.0",
        )


def second_copy(config: TrainConfig) -> Iterator[str]:
    """A sentence on a reference policy that the actor could be."""
    adapted = config.actor_rollout_ref.model.lora_rank > 0
    if adapted and config.needs_reference and not config.reference_is_the_actor:
        yield (
            "actor_rollout_ref.model.lora_rank: the reference policy is placed apart and holds the base "
            "weights a second time; placed with the actor it needs none of its own."
        )
