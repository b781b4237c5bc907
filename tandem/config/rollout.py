"""`actor_rollout_ref.rollout`: how responses are sampled, and the old log-probs recomputed."""

from __future__ import annotations

from typing import Annotated, Literal

from tandem.config import tables
from tandem.config.batching import LogProbSection
from tandem.config.section import Names, OneOf, Section, key

ENGINE = "engines.rollout"
ABSENT = dict.fromkeys(
    ("vllm", "sglang", "tgi"), "this build has native and hf: set actor_rollout_ref.rollout.name=native"
)


class ValidationSampling(Section):
    """Sampling of validation responses."""

    temperature: float = key(0.0, "divides the logits; 0: greedy", read_by="trainer.evaluate", ge=0)
    top_k: int = key(-1, "sample among the k likeliest tokens; -1: all", read_by="trainer.evaluate", ge=-1)
    top_p: float = key(
        1.0,
        "sample among the likeliest tokens of this total probability",
        read_by="trainer.evaluate",
        gt=0,
        le=1,
    )
    n: int = key(1, "responses per validation prompt", read_by="trainer.evaluate", ge=1)
    do_sample: bool = key(False, "false: greedy, whatever the temperature", read_by="trainer.evaluate")


class RolloutConfig(LogProbSection):
    """The rollout engine and its sampling."""

    name: Annotated[str, OneOf(tables.ROLLOUT_ENGINES, absent=ABSENT)] = key(
        "native", "rollout engine; hf is the slow reference", read_by="engines.rollout.registry"
    )
    n: int = key(1, "responses per training prompt", read_by="trainer.ppo", ge=1)
    temperature: float = key(
        1.0, "divides the logits, in sampling and in training", read_by="trainer.ppo, workers.actor", gt=0
    )
    top_k: int = key(-1, "sample among the k likeliest tokens; -1: all", read_by="trainer.ppo", ge=-1)
    top_p: float = key(
        1.0, "sample among the likeliest tokens of this total probability", read_by="trainer.ppo", gt=0, le=1
    )
    stop: Names = key((), "texts that end a response, one or a list", read_by="trainer.ppo")
    max_num_seqs: int = key(256, "responses written at the same time, at most", read_by=ENGINE, ge=1)
    max_num_batched_tokens: int = key(
        8192, "prompt tokens of one engine step; a longer prompt runs alone", read_by=ENGINE, ge=1
    )
    gpu_memory_utilization: float = key(
        0.5,
        "share of the device's memory for weights and KV cache; on a CPU, of the free memory for the cache",
        read_by="engines.rollout.native",
        gt=0,
        le=1,
    )
    tensor_model_parallel_size: int = key(
        1, "devices that share the engine's weights", read_by="config", ge=1
    )
    disable_log_stats: bool = key(True, "keep the engine's progress lines out of the log", read_by=ENGINE)
    runner: Literal["auto", "fused", "module"] = key(
        "auto",
        "forward of the native engine: fused decoder, or transformers' module; auto: fused where it can",
        read_by="engines.rollout.native",
    )
    val_kwargs: ValidationSampling = ValidationSampling()
