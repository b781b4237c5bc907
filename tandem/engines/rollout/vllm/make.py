"""A factory that creates a vLLM engine from the config, in this process or on a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tandem.config.rollout import EngineConfig
from tandem.engines.rollout.base import RolloutEngine
from tandem.engines.rollout.http.channel import Network
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.make import on_servers
from tandem.engines.rollout.http.process import server_log
from tandem.engines.rollout.vllm.process import check_installed, check_runs, serve
from tandem.engines.rollout.vllm.server import VLLMServerEngine
from tandem.errors import ConfigError

_MEMORY_SHARE = 0.5  # the default fraction of a device's memory if training uses this device too
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _require_precision(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise ConfigError(
            "vLLM does not support this precision",
            field="actor_rollout_ref.actor.fsdp_config.dtype",
            got=str(dtype).removeprefix("torch."),
            expected="fp32 or bf16",
            remedy="set this key to one of these, or set actor_rollout_ref.rollout.name=native",
        )


def _require_processed(logprobs_mode: str) -> None:
    if logprobs_mode != "processed_logprobs":
        raise ConfigError(
            "a server can only return the log-probs of the distribution that it samples from",
            field="actor_rollout_ref.rollout.logprobs_mode",
            got=logprobs_mode,
            expected="processed_logprobs",
            remedy="remove this key, or set actor_rollout_ref.rollout.mode=colocate",
        )


def make_vllm_engine(
    rollout: EngineConfig,
    common: dict[str, Any],
    *,
    model_path: str,
    dtype: torch.dtype,
    device: torch.device,
    log: Callable[[str], None] | None,
    log_file: Path | None,
    share: tuple[int, int] = (0, 1),
    **colocated: Any,
) -> RolloutEngine:
    """Create a vLLM engine without weights. Mode "server" without URLs also starts the server.

    Args:
        rollout: The config of the engine.
        common: The arguments max_length, max_num_seqs, decode and log of `VLLMEngine` or `VLLMServerEngine`.
        model_path: A Hugging Face model folder.
        dtype: The dtype of the weights that the engine will get.
        device: The device.
        log: A function that receives a message when a server is lost.
        log_file: The file for the output of a server that is started here. None means a temporary file.
        share: See `on_servers`.
        colocated: tensor_parallel_size and records_experts of `VLLMEngine`, which servers do not use.

    Raises:
        ConfigError: vLLM is not installed or does not support the model or the config. See also `on_servers`.
        EngineError: vLLM cannot run the model.
    """
    _require_precision(dtype)
    server, on_server = rollout.server, rollout.mode == "server"
    if on_server and server.urls:
        chosen = server.weights_backend
        network = Network(device, None if chosen == "auto" else chosen)
        config = AutoConfig.from_pretrained(model_path)
        make = partial(VLLMServerEngine, config=config, network=network, **common)
        return on_servers(rollout, make, log=log, share=share)
    if on_server:
        _require_processed(rollout.logprobs_mode)
    check_installed()
    config = AutoConfig.from_pretrained(model_path)
    check_runs(config, device)
    options: dict[str, Any] = {
        "device": device,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "gpu_memory_utilization": rollout.gpu_memory_utilization or _MEMORY_SHARE,
        "dtype": dtype,
        "enforce_eager": rollout.enforce_eager,
        "enable_prefix_caching": rollout.enable_prefix_caching,
    }
    if not on_server:
        options |= {"logprobs_mode": rollout.logprobs_mode, **colocated}
        engine: Callable[..., RolloutEngine] = import_module("tandem.engines.rollout.vllm.engine").VLLMEngine
        return engine(model_path=model_path, config=config, **options, **common)
    options |= {name: common[name] for name in ("max_length", "max_num_seqs")}
    output = server_log("vLLM", log_file, common["log"])
    options |= {"start_timeout_s": server.start_timeout, "keeps_log": log_file is not None}
    process = serve(model_path, config, log=output, **options)
    at = Server(process.url, request_timeout_s=server.request_timeout)
    return VLLMServerEngine(at, config=config, process=process, sleeps=device.type == "cuda", **common)
