"""`actor_rollout_ref.rollout`: how responses are sampled, and the old log-probs recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, Any, Literal

from tandem.config import tables
from tandem.config.batching import LogProbSection
from tandem.config.data import DataConfig
from tandem.config.dynamic_sampling import BySteps
from tandem.config.needs import Check, countable, no_greedy_repeats, within_response
from tandem.config.section import LocalPath, Names, OneOf, Section, When, beside, key, section
from tandem.config.view import path, root
from tandem.errors import ConfigError

_NATIVE = beside("name", "native", notice=True)
_IN_PROCESS = beside("name", "native", "vllm", notice=True)
_ON_SERVERS = When(
    lambda own: own.on_servers,
    f"with {{name}}={' or '.join(tables.SERVER_ENGINES)}, or with {{name}}=vllm and {{mode}}=server",
)
_NO_SERVER_ENGINE = When(lambda own: own.name not in tables.SERVER_ENGINES, "with {name}=vllm")
_VALIDATES = When(lambda own: bool(root(own).data.val_files), "with data.val_files", notice=True)
_DRAWN = When(
    lambda own: own.val_kwargs.do_sample,
    "with {val_kwargs.do_sample}=true (without it validation is greedy)",
    notice=True,
)


def ends_early(at: str = "") -> When:
    """Of min_tokens: where a response can end before its greatest length.

    Args:
        at: where the rollout section lies, seen from the section that declares this, with a dot.
    """
    return When(
        lambda own: not attrgetter(f"{at}ignore_eos")(own) or bool(attrgetter(f"{at}stop")(own)),
        f"with {{{at}ignore_eos}}=false, or with {{{at}stop}}",
        notice=True,
    )


def _apart(own: Any) -> bool:
    trainer = root(own).trainer
    own_workers = not {"actor", "rollout"}.isdisjoint(trainer.worker_classes)
    return trainer.placed("rollout") != trainer.placed("actor") or own_workers


_BEYOND_PROMPTS = Check(
    lambda own, length: length is not None and length <= root(own).data.max_prompt_length,
    "leaves the longest prompt no response",
    expected="more than data.max_prompt_length, {=data.max_prompt_length}",
    remedy="raise it, or lower data.max_prompt_length below {=}",
)


def _possible(own: Any, name: str) -> Iterator[ConfigError]:
    """So many responses as one step asks for can be held."""
    yield from _held(own, getattr(own, name))


def _held(own: Any, n: int) -> Iterator[ConfigError]:
    data = root(own).data
    size = "data.gen_batch_size" if data.gen_batch_size else "data.train_batch_size"
    yield from countable(n, data.prompts_at_a_time, "prompts of a step", size)


def _of_steps(own: Any, name: str) -> Iterator[ConfigError]:
    """Steps and numbers of responses that exist."""
    for step, n in getattr(own, name).items():
        if step < 1 or n < 1:
            yield ConfigError(
                "out of range",
                got=f"{step}: {n}",
                expected="a training step >= 1, and a number of responses >= 1",
                remedy=f"write for instance {path(own, name)}={{1: 4, 100: 8}}",
            )
        elif n == 1 and root(own).algorithm.adv_estimator == "rloo":
            yield ConfigError(
                "rloo leaves one sample of a prompt out, and there is only one",
                got=f"{step}: {n}",
                expected=">= 2 responses",
                remedy="raise it, or choose another algorithm.adv_estimator",
            )
        else:
            yield from _held(own, n)


def _possible_validation(own: Any, name: str) -> Iterator[ConfigError]:
    prompts = root(own).data.val_batch_size or 1
    yield from countable(getattr(own, name), prompts, "validation prompts at a time", "data.val_batch_size")


_NOT_GREEDY = Check(
    lambda own, draws: draws and own.temperature == 0,
    "temperature 0 is greedy",
    expected="a {temperature} above 0",
    remedy="set {temperature}=1.0, or {}=false",
)


class SamplingSection(Section):
    """What changes the distribution that tokens are drawn from, beside the temperature. Training computes
    with softmax(logits / temperature) alone: it is compared with the log-probs under that distribution.

    Attributes:
        top_k: sample among the k likeliest tokens; -1: all
        top_p: sample among the likeliest tokens of this total probability
        min_p: sample among the tokens this share as likely as the likeliest; 0: all
        repetition_penalty: divides positive, multiplies negative logits of tokens in prompt or response; 1:
            none
        presence_penalty: taken off the logits of tokens in the response
        frequency_penalty: taken off for each time a token is in the response
        min_tokens: neither a stop token nor the end of a stop text is among the first so many
    """

    top_k: int = key(-1, ge=-1)
    top_p: float = key(1.0, gt=0, le=1)
    min_p: float = key(0.0, ge=0, le=1)
    repetition_penalty: float = key(1.0, gt=0)
    presence_penalty: float = key(0.0, ge=-2, le=2)
    frequency_penalty: float = key(0.0, ge=-2, le=2)
    min_tokens: int = key(0, needs=within_response, ge=0)


class ValidationSampling(SamplingSection):
    """Sampling of validation responses.

    Attributes:
        temperature: divides the logits; 0: greedy
        n: responses per validation prompt
        do_sample: false: greedy, whatever the temperature
    """

    all_resumed = "told"

    temperature: float = key(0.0, ge=0)
    n: int = key(1, needs=(no_greedy_repeats(lambda own: not own.do_sample), _possible_validation), ge=1)
    do_sample: bool = key(False, needs=_NOT_GREEDY)


class ServerConfig(Section):
    """Servers that write the responses, each with the same model.

    Attributes:
        urls: addresses, http://host:port, one or a list
        model: name of the model on a server that has several; openai only
        api_key_env: environment variable with the key that the servers ask for
        connect_timeout: until a connection stands, seconds
        request_timeout: from a request's start to the end of its answer, seconds
        weights_backend: how vllm servers get new weights over the network; auto: nccl between GPUs, else gloo
        weights_folder: folder through which sglang servers get new weights; they see it under the same path
    """

    all_resumed = "told"

    urls: Names = ()
    model: str | None = None
    api_key_env: str | None = None
    connect_timeout: float = key(10.0, gt=0)
    request_timeout: float = key(1800.0, gt=0)
    weights_backend: Literal["auto", "nccl", "gloo"] = "auto"
    weights_folder: LocalPath | None = None


class EngineConfig(SamplingSection):
    """The rollout engine and its sampling.

    Attributes:
        name: rollout engine; hf is the slow reference
        mode: vllm: in the worker's own process, or on server.urls, or without these on a server that the
            worker starts
        n: responses per training prompt
        temperature: divides the logits, in sampling and in training
        stop: texts that end a response, one or a list
        ignore_eos: write on past end-of-sequence tokens, to the greatest length
        logprobs_mode: what the engine gives for each token: under the distribution sampled from, or the
            model's own
        max_num_seqs: responses written at the same time, at most
        max_num_batched_tokens: tokens of one engine step: responses first, then prompts
        enable_chunked_prefill: a prompt may be computed in several steps; false: whole, alone if it exceeds
            the tokens of a step
        enable_prefix_caching: a prompt that begins like an earlier sequence reuses its part of the cache
        gpu_memory_utilization: share of the device's memory for all that the rollout holds: weights, KV
            cache, work space; the native engine takes less where training leaves less; on a CPU, of all
            memory for the cache; null: 0.9 for the native engine on CUDA if free_cache_engine, else 0.5
        enforce_eager: on CUDA, launch each step's kernels one by one instead of replaying graphs
        block_size: tokens per block of the KV cache
        num_gpu_blocks_override: blocks of the KV cache, whatever memory there is; null: by memory and need
        tensor_model_parallel_size: devices that split each layer of the native or vllm engine; further ones
            take further samples
        disable_log_stats: keep the engine's progress lines out of the log
        runner: forward of the native engine: fused decoder, or transformers' module; auto: fused where it can
    """

    name: Annotated[str, OneOf(tables.ROLLOUT_ENGINES)] = key("native", resumed="told")
    mode: Literal["colocate", "server"] = key("colocate", when=beside("name", "vllm"), resumed="told")
    server: ServerConfig = section(
        ServerConfig(), when=_ON_SERVERS, below={"weights_backend": _NO_SERVER_ENGINE}
    )
    n: int = key(1, ge=1)
    temperature: float = key(1.0, gt=0)
    stop: Names = ()
    ignore_eos: bool = False
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"] = (
        "processed_logprobs"
    )
    max_num_seqs: int = key(256, ge=1, resumed="told")
    max_num_batched_tokens: int = key(8192, ge=1, resumed="told")
    enable_chunked_prefill: bool = key(True, when=_NATIVE, resumed="told")
    enable_prefix_caching: bool = key(True, when=_IN_PROCESS, resumed="told")
    gpu_memory_utilization: float | None = key(None, when=_IN_PROCESS, gt=0, le=1, resumed="told")
    enforce_eager: bool = key(False, when=_IN_PROCESS, resumed="told")
    block_size: int = key(16, when=_NATIVE, ge=1, resumed="told")
    num_gpu_blocks_override: int | None = key(None, when=_NATIVE, ge=1, resumed="told")
    tensor_model_parallel_size: int = key(1, ge=1, resumed="told")
    disable_log_stats: bool = key(True, resumed="told")
    runner: Literal["auto", "fused", "module"] = key("auto", when=_NATIVE, resumed="told")

    @property
    def on_servers(self) -> bool:
        """Tells whether responses come from servers, started by this run or by somebody else."""
        return self.name in tables.SERVER_ENGINES or (self.name == "vllm" and self.mode == "server")

    @property
    def on_named_servers(self) -> bool:
        """Tells whether responses come from servers that somebody else has started."""
        return self.on_servers and (self.name in tables.SERVER_ENGINES or bool(self.server.urls))

    @property
    def split(self) -> int:
        """Devices of this run that split each layer of an engine."""
        return 1 if self.on_named_servers else self.tensor_model_parallel_size


class RolloutConfig(EngineConfig, LogProbSection):
    """The rollout of a training run.

    Attributes:
        n: responses per training prompt
        n_schedule: responses per training prompt from a training step on, {step: n, …}; before the first
            step, n
        max_model_len: longest prompt and response together, tokens; a response ends there; null:
            data.max_prompt_length + data.max_response_length
        free_cache_engine: give the engine's KV cache and weights back after each generation
        update_weights_bucket_megabytes: weights sent at a time to a rollout on another pool than the actor,
            MiB; a larger tensor goes alone
        log_prob_diff_limit: mean difference between the log-probs sampled with and those trained with, nats,
            above which the cause is named; null: by precision, fp64 1e-7, fp32 1e-4, bf16 0.02
    """

    n: int = key(1, needs=_possible, ge=1)
    n_schedule: BySteps = key({}, needs=_of_steps)
    max_model_len: int | None = key(None, needs=_BEYOND_PROMPTS, ge=2)
    free_cache_engine: bool = key(True, resumed="told")
    update_weights_bucket_megabytes: int = key(
        2048, when=When(_apart, "where actor and rollout are apart", notice=True), ge=1, resumed="told"
    )
    log_prob_diff_limit: float | None = key(None, gt=0, resumed="told")
    val_kwargs: ValidationSampling = section(
        ValidationSampling(),
        when=_VALIDATES,
        below={
            **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), _DRAWN),
            "min_tokens": ends_early(),
        },
    )

    def longest(self, data: DataConfig) -> int:
        """Tokens of a prompt and its response together, at most."""
        return min(data.longest, self.max_model_len or data.longest)

    @property
    def group_sizes(self) -> dict[int, int]:
        """Responses per training prompt by the step from which on they count, in order of the steps."""
        return {1: self.n} | dict(sorted(self.n_schedule.items()))
