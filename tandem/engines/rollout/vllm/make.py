"""Makes vLLM's engine, in this process or on a server, from the config."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tandem.config.rollout import EngineConfig
from tandem.engines.rollout.base import RolloutEngine
from tandem.engines.rollout.draws.stops import Decode
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.make import on_servers
from tandem.engines.rollout.vllm.process import absent, serve
from tandem.engines.rollout.vllm.server import Network, VLLMServerEngine
from tandem.errors import ConfigError

_IN_PROCESS = ("tandem.engines.rollout.vllm.engine", "VLLMEngine")
_MEMORY_SHARE = 0.5  # of a device that training shares
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_vllm_engine(
    rollout: EngineConfig,
    *,
    model_path: str,
    dtype: torch.dtype,
    decode: Decode | None,
    device: torch.device,
    max_length: int,
    log: Callable[[str], None] | None,
    log_file: Path | None,
    share: tuple[int, int] = (0, 1),
    tensor_parallel_size: int = 1,
) -> RolloutEngine:
    """The engine of `rollout.mode`, without weights. Where no servers are named, one is started for it, and
    ends with it.

    Args:
        model_path: a Hugging Face model folder.
        dtype: of the weights that it will be given.
        log_file: takes what a server prints; None: a temporary one does.
        share: see `make_http_engine`.
        tensor_parallel_size: see `VLLMEngine`, of an engine in this process.

    Raises:
        ConfigError: vLLM is not installed, or has not what is asked for; see also `make_http_engine`.
        EngineError: vLLM cannot run the model.
    """
    if dtype not in _DTYPES:
        raise ConfigError(
            "vLLM has no such precision",
            field="actor_rollout_ref.actor.fsdp_config.dtype",
            got=str(dtype).removeprefix("torch."),
            expected="fp32 or bf16",
            remedy="set it, or actor_rollout_ref.rollout.name=native",
        )
    if rollout.mode == "server" and rollout.server.urls:
        return _on_servers(rollout, model_path, device, max_length, decode, log, share)
    log = None if rollout.disable_log_stats else log
    options: dict[str, Any] = {
        "device": device,
        "max_length": max_length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "gpu_memory_utilization": rollout.gpu_memory_utilization or _MEMORY_SHARE,
        "dtype": dtype,
        "enforce_eager": rollout.enforce_eager,
        "enable_prefix_caching": rollout.enable_prefix_caching,
    }
    if rollout.mode == "server":
        return _on_server(rollout, model_path, options, decode, log, log_file)
    options |= {"logprobs_mode": rollout.logprobs_mode, "decode": decode, "log": log}
    options["tensor_parallel_size"] = tensor_parallel_size
    return _class()(model_path=model_path, config=AutoConfig.from_pretrained(model_path), **options)


def _class() -> Callable[..., RolloutEngine]:
    module, attribute = _IN_PROCESS
    try:
        found: Callable[..., RolloutEngine] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise absent() from error
    return found


def _on_servers(
    rollout: EngineConfig,
    model_path: str,
    device: torch.device,
    max_length: int,
    decode: Decode | None,
    log: Callable[[str], None] | None,
    share: tuple[int, int],
) -> RolloutEngine:
    config = AutoConfig.from_pretrained(model_path)
    chosen = rollout.server.weights_backend
    network = Network(device, None if chosen == "auto" else chosen)
    return on_servers(
        rollout,
        lambda server: VLLMServerEngine(
            server,
            config=config,
            max_length=max_length,
            max_num_seqs=rollout.max_num_seqs,
            decode=decode,
            network=network,
            log=None if rollout.disable_log_stats else log,
        ),
        max_length=max_length,
        vocabulary=None,
        log=log,
        share=share,
    )


def _on_server(
    rollout: EngineConfig,
    model_path: str,
    options: dict[str, Any],
    decode: Decode | None,
    log: Callable[[str], None] | None,
    log_file: Path | None,
) -> RolloutEngine:
    if rollout.logprobs_mode != "processed_logprobs":
        raise ConfigError(
            "a server is asked for the log-probs of the distribution sampled from",
            field="actor_rollout_ref.rollout.logprobs_mode",
            got=rollout.logprobs_mode,
            expected="processed_logprobs",
            remedy="remove this key, or set actor_rollout_ref.rollout.mode=colocate",
        )
    config = AutoConfig.from_pretrained(model_path)
    output = log_file or Path(tempfile.mkdtemp(prefix="tandem-vllm-")) / "server.log"
    if log is not None:
        log(f"vLLM's server writes to {output}")
    process = serve(model_path, config, log=output, keeps_log=log_file is not None, **options)
    return VLLMServerEngine(
        Server(process.url, request_timeout_s=rollout.server.request_timeout),
        config=config,
        max_length=options["max_length"],
        max_num_seqs=options["max_num_seqs"],
        process=process,
        decode=decode,
        sleeps=options["device"].type == "cuda",
        log=log,
    )
