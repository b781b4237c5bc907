"""A factory that creates the rollout engine with a given name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.rollout import EngineConfig, RolloutConfig
from tandem.engines.rollout.base import RolloutEngine
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.http.make import HTTP_ENGINES, http_options, on_servers
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.engines.rollout.own_weights import OwnWeights
from tandem.engines.rollout.sglang.make import make_sglang_engine
from tandem.engines.rollout.vllm.make import make_vllm_engine
from tandem.errors import ConfigError

_NAME = "actor_rollout_ref.rollout.name"
_STALL_S = 600.0
_SHARE_OF_A_CACHE_THAT_STAYS = 0.5
_ENGINES: dict[str, Callable[..., RolloutEngine]] = {"native": NativeEngine, "hf": HFEngine}


def make_rollout_engine(
    name: str,
    rollout: EngineConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    max_length: int,
    log: Callable[[str], None] | None,
    say: Callable[[str], None] | None = None,
    share: tuple[int, int] = (0, 1),
    split: LayerSplit = WHOLE,
    model_path: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = None,
    log_file: Path | None = None,
    records_experts: bool = False,
) -> RolloutEngine:
    """Create the engine with the given name, without weights.

    Args:
        name: The engine's name. ConfigError if there is none or its package is missing.
        rollout: The engine's config: batching, memory and runner. Sampling parameters are part of each
            request.
        tokenizer: Decodes tokens for stop strings. None if no request has stop strings.
        device: The device of the engine.
        max_length: The maximum number of prompt and response tokens together.
        log: A function that receives the engine's statistics, unless `rollout.disable_log_stats` is set.
        say: A function that receives sentences for the user about the engine's memory (native only).
        share: (number of this worker, count of workers) that share the servers of `rollout.server`.
        split: The ranks that split the layers (native, vllm, sglang).
        model_path: The model folder, for engines with own weights (vllm, sglang; native and hf with streams).
        trust_remote_code: Whether native and hf run the model class that the folder contains.
        dtype: The dtype of the weights that the engine will get (vllm, sglang).
        log_file: The file for the output of a server that is started here. None means a temporary file.
        records_experts: Whether samples contain the experts that computed their tokens (native,
            hf, and vllm in this process).
    """
    common: dict[str, Any] = {"max_length": max_length, "max_num_seqs": rollout.max_num_seqs}
    common["log"] = None if rollout.disable_log_stats else log
    if name in HTTP_ENGINES:
        make = partial(HTTP_ENGINES[name], **http_options(name, tokenizer), **common)
        return on_servers(rollout, make, log=log, share=share)
    common["decode"] = None if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=True)
    if name in ("vllm", "sglang"):
        assert model_path is not None and dtype is not None
        own: dict[str, Any] = {"model_path": model_path, "dtype": dtype, "device": device}
        own |= {"log": log, "log_file": log_file, "share": share}
        if name == "sglang":
            return make_sglang_engine(rollout, common, group=split.group, **own)
        own |= {"tensor_parallel_size": split.size, "records_experts": records_experts}
        return make_vllm_engine(rollout, common, **own)
    if name not in _ENGINES:
        known = " or ".join((*_ENGINES, "vllm", "sglang", *HTTP_ENGINES))
        raise ConfigError("there is no rollout engine of this name", field=_NAME, got=name, expected=known)
    options = _native_options(rollout) | {"split": split, "say": say} if name == "native" else {}
    stream = None
    if model_path is not None:
        stream = OwnWeights(model_path, device, trust_remote_code=trust_remote_code)
    common |= {"max_num_batched_tokens": rollout.max_num_batched_tokens, "records_experts": records_experts}
    return _ENGINES[name](device=device, own=stream, logprobs_mode=rollout.logprobs_mode, **common, **options)


def stall_timeout_s(rollout: EngineConfig) -> float:
    """Return the seconds without a new token after which an engine counts as stalled.

    With servers, a request that hangs uses its whole timeout, and is then sent to another server with the
    same timeout. The second server may report the tokens only when the answer is complete.
    """
    return _STALL_S + (2 * rollout.server.request_timeout if rollout.on_servers else 0.0)


def _native_options(rollout: EngineConfig) -> dict[str, Any]:
    share = rollout.gpu_memory_utilization
    if share is None and isinstance(rollout, RolloutConfig) and not rollout.free_cache_engine:
        share = _SHARE_OF_A_CACHE_THAT_STAYS  # the weight update needs the remaining memory
    return {
        "gpu_memory_utilization": share,
        "block_size": rollout.block_size,
        "num_gpu_blocks_override": rollout.num_gpu_blocks_override,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enforce_eager": rollout.enforce_eager,
        "runner": rollout.runner,
    }
