"""A factory that creates an SGLang engine from the config."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from tandem.config.rollout import EngineConfig, RolloutConfig
from tandem.engines.rollout.base import RolloutEngine
from tandem.engines.rollout.http.channel import Network
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.group import GroupEngine, device_name
from tandem.engines.rollout.http.make import on_servers
from tandem.engines.rollout.http.process import server_log
from tandem.engines.rollout.http.shards import WeightsFolder
from tandem.engines.rollout.sglang.engine import SGLangEngine
from tandem.engines.rollout.sglang.process import serve

_MEMORY_SHARE = 0.5  # the default share of a device that training uses too


def make_sglang_engine(
    rollout: EngineConfig,
    common: dict[str, Any],
    *,
    model_path: str,
    dtype: torch.dtype,
    device: torch.device,
    log: Callable[[str], None] | None,
    log_file: Path | None,
    share: tuple[int, int] = (0, 1),
    group: dist.ProcessGroup | None = None,
) -> RolloutEngine:
    """Create SGLang's engine. A server that is started here has no weights yet.

    Args:
        rollout: The config of the engine.
        common: The arguments max_length, max_num_seqs, decode and log of the engine.
        model_path: A Hugging Face model folder.
        dtype: The dtype of the weights that the engine will get.
        device: The device of this process. A server that is started here uses the same device.
        log: A function that receives a message when a server is lost.
        log_file: The file for the output of a server that is started here. None means a temporary file.
        share: See `on_servers`.
        group: The ranks that share a server that is started here. None means that it uses only `device`.

    Raises:
        ConfigError: SGLang is not installed. See also `on_servers`.
        EngineError: SGLang cannot run the model.
    """
    server = rollout.server
    config = AutoConfig.from_pretrained(model_path)
    options = common | {"config": config, "vocabulary": config.get_text_config().vocab_size}
    if server.urls:
        elsewhere = options | {"decode": None, "weights": _way(rollout, device)}
        return on_servers(rollout, partial(SGLangEngine, **elsewhere), log=log, share=share)

    def start(devices: Sequence[str]) -> SGLangEngine:
        process = serve(
            config,
            log=server_log("SGLang", log_file, common["log"]),
            devices=devices,
            dtype=dtype,
            **{name: common[name] for name in ("max_length", "max_num_seqs")},
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            gpu_memory_utilization=rollout.gpu_memory_utilization or _MEMORY_SHARE,
            enforce_eager=rollout.enforce_eager,
            enable_prefix_caching=rollout.enable_prefix_caching,
            python=server.python or sys.executable,
            arguments=server.arguments,
            start_timeout_s=server.start_timeout,
            keeps_log=log_file is not None,
        )
        at = Server(process.url, request_timeout_s=server.request_timeout)
        return SGLangEngine(at, process=process, **options)

    return start([device_name(device)]) if group is None else GroupEngine(group, device, start)


def _way(rollout: EngineConfig, device: torch.device) -> WeightsFolder | Network | None:
    """Return how servers elsewhere get new weights.

    None means that they keep their own weights. That is so unless the config is that of a training run or
    names a folder for weights.
    """
    server = rollout.server
    if server.weights_folder is not None:
        return WeightsFolder(Path(server.weights_folder))
    if isinstance(rollout, RolloutConfig):
        return Network(device, None if server.weights_backend == "auto" else server.weights_backend)
    return None
