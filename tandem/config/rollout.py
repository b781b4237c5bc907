"""`actor_rollout_ref.rollout`: how responses are sampled, and the old log-probs recomputed."""

from __future__ import annotations

from typing import Annotated, Literal

from tandem.config import tables
from tandem.config.batching import LogProbSection
from tandem.config.dynamic_sampling import BySteps
from tandem.config.section import LocalPath, Names, OneOf, Section, key

ENGINE = "engines.rollout"
SERVERS = "engines.rollout.http"
NATIVE = "engines.rollout.native"
SAMPLING = "trainer.sampling_params"
VLLM = "engines.rollout.vllm.make"
BOTH = f"{NATIVE}, {VLLM}"


class SamplingSection(Section):
    """What changes the distribution that tokens are drawn from, beside the temperature. Training computes
    with softmax(logits / temperature) alone: it is compared with the log-probs under that distribution."""

    top_k: int = key(-1, "sample among the k likeliest tokens; -1: all", read_by=SAMPLING, ge=-1)
    top_p: float = key(
        1.0, "sample among the likeliest tokens of this total probability", read_by=SAMPLING, gt=0, le=1
    )
    min_p: float = key(
        0.0,
        "sample among the tokens this share as likely as the likeliest; 0: all",
        read_by=SAMPLING,
        ge=0,
        le=1,
    )
    repetition_penalty: float = key(
        1.0,
        "divides positive, multiplies negative logits of tokens in prompt or response; 1: none",
        read_by=SAMPLING,
        gt=0,
    )
    presence_penalty: float = key(
        0.0, "taken off the logits of tokens in the response", read_by=SAMPLING, ge=-2, le=2
    )
    frequency_penalty: float = key(
        0.0, "taken off for each time a token is in the response", read_by=SAMPLING, ge=-2, le=2
    )
    min_tokens: int = key(
        0,
        "neither a stop token nor the end of a stop text is among the first so many",
        read_by=SAMPLING,
        ge=0,
    )


class ValidationSampling(SamplingSection):
    """Sampling of validation responses."""

    temperature: float = key(0.0, "divides the logits; 0: greedy", read_by=SAMPLING, ge=0)
    n: int = key(1, "responses per validation prompt", read_by="trainer.gathering", ge=1)
    do_sample: bool = key(False, "false: greedy, whatever the temperature", read_by=SAMPLING)


class ServerConfig(Section):
    """Servers that write the responses, each with the same model."""

    urls: Names = key((), "addresses, http://host:port, one or a list", read_by=SERVERS)
    model: str | None = key(
        None, "name of the model on a server that has several; openai only", read_by=SERVERS
    )
    api_key_env: str | None = key(
        None, "environment variable with the key that the servers ask for", read_by=SERVERS
    )
    connect_timeout: float = key(10.0, "until a connection stands, seconds", read_by=SERVERS, gt=0)
    request_timeout: float = key(
        1800.0, "from a request's start to the end of its answer, seconds", read_by=SERVERS, gt=0
    )
    weights_backend: Literal["auto", "nccl", "gloo"] = key(
        "auto",
        "how vllm servers get new weights over the network; auto: nccl between GPUs, else gloo",
        read_by=VLLM,
    )
    weights_folder: LocalPath | None = key(
        None,
        "folder through which sglang servers get new weights; they see it under the same path",
        read_by=SERVERS,
    )


class EngineConfig(SamplingSection):
    """The rollout engine and its sampling."""

    name: Annotated[str, OneOf(tables.ROLLOUT_ENGINES)] = key(
        "native", "rollout engine; hf is the slow reference", read_by="engines.rollout.registry"
    )
    mode: Literal["colocate", "server"] = key(
        "colocate",
        "vllm: in the worker's own process, or on server.urls, or without these on a server that the worker "
        "starts",
        read_by=VLLM,
    )
    server: ServerConfig = ServerConfig()
    n: int = key(1, "responses per training prompt", read_by="trainer.ppo", ge=1)
    temperature: float = key(
        1.0, "divides the logits, in sampling and in training", read_by="trainer.ppo, workers.actor", gt=0
    )
    stop: Names = key((), "texts that end a response, one or a list", read_by=SAMPLING)
    ignore_eos: bool = key(
        False, "write on past end-of-sequence tokens, to the greatest length", read_by=SAMPLING
    )
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"] = key(
        "processed_logprobs",
        "what the engine gives for each token: under the distribution sampled from, or the model's own",
        read_by=ENGINE,
    )
    max_num_seqs: int = key(256, "responses written at the same time, at most", read_by=ENGINE, ge=1)
    max_num_batched_tokens: int = key(
        8192, "tokens of one engine step: responses first, then prompts", read_by=ENGINE, ge=1
    )
    enable_chunked_prefill: bool = key(
        True,
        "a prompt may be computed in several steps; false: whole, alone if it exceeds the tokens of a step",
        read_by=NATIVE,
    )
    enable_prefix_caching: bool = key(
        True, "a prompt that begins like an earlier sequence reuses its part of the cache", read_by=BOTH
    )
    gpu_memory_utilization: float = key(
        0.5,
        "share of the device's memory for weights and KV cache; on a CPU, of all memory for the cache",
        read_by=BOTH,
        gt=0,
        le=1,
    )
    enforce_eager: bool = key(
        False, "on CUDA, launch each step's kernels one by one instead of replaying graphs", read_by=BOTH
    )
    block_size: int = key(16, "tokens per block of the KV cache", read_by=NATIVE, ge=1)
    num_gpu_blocks_override: int | None = key(
        None,
        "blocks of the KV cache, whatever memory there is; null: by memory and need",
        read_by=NATIVE,
        ge=1,
    )
    tensor_model_parallel_size: int = key(
        1, "devices that split each layer of the native engine", read_by="workers.actor", ge=1
    )
    disable_log_stats: bool = key(True, "keep the engine's progress lines out of the log", read_by=ENGINE)
    runner: Literal["auto", "fused", "module"] = key(
        "auto",
        "forward of the native engine: fused decoder, or transformers' module; auto: fused where it can",
        read_by=NATIVE,
    )


class RolloutConfig(EngineConfig, LogProbSection):
    """The rollout of a training run."""

    n_schedule: BySteps = key(
        {},
        "responses per training prompt from a training step on, {step: n, …}; before the first step, n",
        read_by="trainer.steps",
    )
    free_cache_engine: bool = key(
        True, "give the engine's KV cache and weights back after each generation", read_by="workers.actor"
    )
    update_weights_bucket_megabytes: int = key(
        2048,
        "weights sent at a time to a rollout on another pool than the actor, MiB; a larger tensor goes alone",
        read_by="workers.actor",
        ge=1,
    )
    log_prob_diff_limit: float | None = key(
        None,
        "mean difference between the log-probs sampled with and those trained with, nats, above which the "
        "cause is named; null: by precision, fp64 1e-7, fp32 1e-4, bf16 0.02",
        read_by="workers.actor",
        gt=0,
    )
    val_kwargs: ValidationSampling = ValidationSampling()

    @property
    def group_sizes(self) -> dict[int, int]:
        """Responses per training prompt by the step from which on they count, in order of the steps."""
        return {1: self.n} | dict(sorted(self.n_schedule.items()))
