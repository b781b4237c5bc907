"""Rollout engines by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.rollout import RolloutConfig
from tandem.engines.rollout.base import RolloutEngine
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.stops import Decode
from tandem.errors import ConfigError

_ENGINES: dict[str, Callable[..., RolloutEngine]] = {"native": NativeEngine, "hf": HFEngine}
_ELSEWHERE = ("vllm", "sglang", "tgi")


def make_rollout_engine(
    name: str,
    rollout: RolloutConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
    max_length: int,
    log: Callable[[str], None] | None,
) -> RolloutEngine:
    """The engine of that name, not yet given weights.

    Args:
        rollout: batching, memory and runner; sampling parameters come with each request.
        tokenizer: for stop strings; None if none will be asked for.
        max_length: tokens of prompt and response together, at most.
        log: receives the engine's statistics unless `rollout.disable_log_stats`.

    Raises:
        ConfigError: no such engine, or one this build does not have.
    """
    if name not in _ENGINES:
        raise ConfigError(
            "this build does not have that engine" if name in _ELSEWHERE else "unknown rollout engine",
            field="actor_rollout_ref.rollout.name",
            got=name,
            expected=" or ".join(_ENGINES),
            remedy="use rollout.name=native",
        )
    options: dict[str, Any] = {
        "device": device,
        "max_length": max_length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "decode": None if tokenizer is None else _decoder(tokenizer),
        "log": None if rollout.disable_log_stats else log,
    }
    if name == "native":
        options |= {"gpu_memory_utilization": rollout.gpu_memory_utilization, "runner": rollout.runner}
    return _ENGINES[name](**options)


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    return decode
