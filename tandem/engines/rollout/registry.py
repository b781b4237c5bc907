"""Rollout engines by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.rollout import EngineConfig
from tandem.engines.rollout.base import RolloutEngine
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.http.make import HTTP_ENGINES, make_http_engine
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.tensor_parallel import WHOLE, TensorParallel
from tandem.engines.rollout.stops import Decode
from tandem.engines.rollout.vllm_make import make_vllm_engine
from tandem.errors import ConfigError

_ENGINES: dict[str, Callable[..., RolloutEngine]] = {"native": NativeEngine, "hf": HFEngine}


def make_rollout_engine(
    name: str,
    rollout: EngineConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    max_length: int,
    log: Callable[[str], None] | None,
    share: tuple[int, int] = (0, 1),
    split: TensorParallel = WHOLE,
    model_path: str | None = None,
    dtype: torch.dtype | None = None,
) -> RolloutEngine:
    """The engine of that name, not yet given weights.

    Args:
        rollout: batching, memory and runner; sampling parameters come with each request.
        tokenizer: for stop strings; None if none will be asked for.
        max_length: tokens of prompt and response together, at most.
        log: receives the engine's statistics unless `rollout.disable_log_stats`.
        share: (number, count) of the workers that divide the servers of `rollout.server` among themselves.
        split: this worker's share of each layer (native).
        model_path: the model's folder, for an engine that makes its own (vllm).
        dtype: of the weights it will be given, for such an engine.

    Raises:
        ConfigError: no such engine, or one whose package is not installed.
    """
    common: dict[str, Any] = {"max_length": max_length, "log": log}
    if name in HTTP_ENGINES:
        return make_http_engine(name, rollout, tokenizer=tokenizer, share=share, **common)
    decode = None if tokenizer is None else _decoder(tokenizer)
    if name == "vllm":
        assert model_path is not None and dtype is not None
        return make_vllm_engine(
            rollout,
            model_path=model_path,
            dtype=dtype,
            decode=decode,
            device=device,
            **common,
        )
    if name not in _ENGINES:
        raise ConfigError(
            "unknown rollout engine",
            field="actor_rollout_ref.rollout.name",
            got=name,
            expected=" or ".join((*_ENGINES, "vllm", *HTTP_ENGINES)),
        )
    options = _native_options(rollout) | {"split": split} if name == "native" else {}
    return _ENGINES[name](
        device=device,
        max_length=max_length,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        logprobs_mode=rollout.logprobs_mode,
        decode=decode,
        log=None if rollout.disable_log_stats else log,
        **options,
    )


def _native_options(rollout: EngineConfig) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "block_size": rollout.block_size,
        "num_gpu_blocks_override": rollout.num_gpu_blocks_override,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enforce_eager": rollout.enforce_eager,
        "runner": rollout.runner,
    }


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    return decode
