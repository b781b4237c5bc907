"""The section `actor_rollout_ref.rollout`: sampling of responses, and recomputation of old log-probs."""

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
_OWN = beside("name", "native", "vllm", "sglang", notice=True)
_ON_SERVERS = When(
    lambda own: own.on_servers,
    f"if {{name}}={' or '.join(tables.SERVER_ENGINES)}, or if {{name}}=vllm and {{mode}}=server",
)
_NEW_WEIGHTS = When(lambda own: own.name not in tables.FIXED_WEIGHTS, "if {name}=vllm or sglang")
_SGLANG = beside("name", "sglang")
_VALIDATES = When(lambda own: bool(root(own).data.val_files), "if data.val_files is set", notice=True)
_DRAWN = When(
    lambda own: own.val_kwargs.do_sample,
    "if {val_kwargs.do_sample}=true (otherwise validation is greedy)",
    notice=True,
)


def ends_early(at: str = "") -> When:
    """Return the condition of min_tokens: a response can end before the length limit.

    Args:
        at: the path from the section that declares the key to the rollout section, with a dot at the end.
    """
    return When(
        lambda own: not attrgetter(f"{at}ignore_eos")(own) or bool(attrgetter(f"{at}stop")(own)),
        f"if {{{at}ignore_eos}}=false, or if {{{at}stop}} is set",
        notice=True,
    )


def _apart(own: Any) -> bool:
    trainer = root(own).trainer
    own_workers = not {"actor", "rollout"}.isdisjoint(trainer.worker_classes)
    return trainer.placed("rollout") != trainer.placed("actor") or own_workers


_BEYOND_PROMPTS = Check(
    lambda own, length: length is not None and length <= root(own).data.max_prompt_length,
    "this leaves no room for a response to the longest prompt",
    expected="more than {=data.max_prompt_length} (data.max_prompt_length)",
    remedy="raise it, or lower data.max_prompt_length below {=}",
)


def _n_countable(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that the responses of one step fit into memory."""
    yield from _check_countable(own, getattr(own, name))


def _check_countable(own: Any, n: int) -> Iterator[ConfigError]:
    data = root(own).data
    size = "data.gen_batch_size" if data.gen_batch_size else "data.train_batch_size"
    yield from countable(n, data.prompts_at_a_time, "prompts of a step", size)


def _schedule_valid(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that the step numbers and the numbers of responses are valid."""
    for step, n in getattr(own, name).items():
        if step < 1 or n < 1:
            yield ConfigError(
                "out of range",
                got=f"{step}: {n}",
                expected="a training step >= 1, and a number of responses >= 1",
                remedy=f"for example, set {path(own, name)}={{1: 4, 100: 8}}",
            )
        elif n == 1 and root(own).algorithm.adv_estimator == "rloo":
            yield ConfigError(
                "rloo compares each sample with the other samples of its prompt, and there is only one",
                got=f"{step}: {n}",
                expected=">= 2 responses",
                remedy="raise it, or use a different algorithm.adv_estimator",
            )
        else:
            yield from _check_countable(own, n)


def _validation_countable(own: Any, name: str) -> Iterator[ConfigError]:
    prompts = root(own).data.val_batch_size or 1
    yield from countable(getattr(own, name), prompts, "validation prompts at a time", "data.val_batch_size")


_NOT_GREEDY = Check(
    lambda own, draws: draws and own.temperature == 0,
    "temperature 0 means greedy decoding, not sampling",
    expected="a {temperature} above 0",
    remedy="set {temperature}=1.0, or {}=false",
)


class SamplingSection(Section):
    """The sampling settings, other than the temperature, that change the distribution of sampled tokens.

    Training always uses softmax(logits / temperature), without these settings. So if they are set, the
    log-probs of training differ from the log-probs of sampling.

    Attributes:
        top_k: Sample only from the k most likely tokens. -1: all tokens.
        top_p: Sample only from the most likely tokens whose probabilities add up to this value. 1: all
            tokens.
        min_p: Sample only from tokens whose probability is at least min_p times the probability of the most
            likely token. 0: all tokens.
        repetition_penalty: For tokens that occur in the prompt or the response, divide positive logits and
            multiply negative logits by this value. 1: no penalty.
        presence_penalty: Subtracted from the logits of tokens that occur in the response.
        frequency_penalty: Subtracted from the logits of a token once for each time that it occurs in the
            response.
        min_tokens: Number of tokens at the start of a response in which neither a stop token nor the end of a
            stop text may occur.
    """

    top_k: int = key(-1, ge=-1)
    top_p: float = key(1.0, gt=0, le=1)
    min_p: float = key(0.0, ge=0, le=1)
    repetition_penalty: float = key(1.0, gt=0)
    presence_penalty: float = key(0.0, ge=-2, le=2)
    frequency_penalty: float = key(0.0, ge=-2, le=2)
    min_tokens: int = key(0, needs=within_response, ge=0)


class ValidationSampling(SamplingSection):
    """The sampling settings of validation responses.

    Attributes:
        temperature: The logits are divided by this value. 0: greedy.
        n: Responses per validation prompt.
        do_sample: Sample validation responses. false: greedy, whatever the temperature is.
    """

    all_resumed = "reported"

    temperature: float = key(0.0, ge=0)
    n: int = key(1, needs=(no_greedy_repeats(lambda own: not own.do_sample), _validation_countable), ge=1)
    do_sample: bool = key(False, needs=_NOT_GREEDY)


_STARTED = When(lambda own: not own.urls, "if {urls} is empty")


class ServerConfig(Section):
    """Servers that generate the responses. All serve the same model.

    Attributes:
        urls: Addresses of the servers, as http://host:port: one address, or a list.
        model: Name of the model, if a server serves several models. Only used by the engine openai.
        api_key_env: Name of the environment variable that holds the API key of the servers.
        connect_timeout: Seconds until a connection must be established.
        request_timeout: Seconds from the start of a request to the end of its response.
        weights_backend: How servers receive new weights over the network. auto: nccl between GPUs, otherwise
            gloo.
        weights_folder: Folder through which SGLang servers receive new weights, instead of the network. The
            servers must see it under the same path.
        python: Python that has SGLang, for a server that a worker starts. null: the Python of this run.
        arguments: More command-line arguments of an SGLang server that a worker starts, without dashes:
            {attention_backend: fa3, …}. They replace those that Tandem chooses.
        start_timeout: Seconds until a server that a worker starts must answer.
    """

    all_resumed = "reported"

    urls: Names = ()
    model: str | None = None
    api_key_env: str | None = None
    connect_timeout: float = key(10.0, gt=0)
    request_timeout: float = key(1800.0, gt=0)
    weights_backend: Literal["auto", "nccl", "gloo"] = "auto"
    weights_folder: LocalPath | None = None
    python: LocalPath | None = key(None, when=_STARTED)
    arguments: dict[str, Any] = key({}, when=_STARTED)
    start_timeout: float = key(600.0, when=_STARTED, gt=0)


class EngineConfig(SamplingSection):
    """The rollout engine and its sampling settings.

    Attributes:
        name: The rollout engine. hf is a slow reference implementation.
        mode: Where the engine vllm runs. colocate: inside the worker's process. server: on the servers of
            server.urls, or, if that is empty, on a server that the worker starts.
        n: Responses per training prompt.
        temperature: The logits are divided by this value, in sampling and in training.
        stop: Texts that end a response: one text, or a list.
        ignore_eos: Continue after an end-of-sequence token, up to the length limit.
        logprobs_mode: What the engine returns for each token: log-probs or logits, of the distribution that
            the token was sampled from (processed) or of the model itself (raw).
        max_num_seqs: Maximum number of responses that are generated at the same time.
        max_num_batched_tokens: Maximum number of tokens in one engine step. Responses that are being
            generated come first, then prompts.
        enable_chunked_prefill: Allow a prompt to be computed over several engine steps. false: each prompt is
            computed in one step. A prompt that is longer than max_num_batched_tokens gets a separate step.
        enable_prefix_caching: If a prompt starts like an earlier sequence, reuse the KV cache of the common
            prefix.
        gpu_memory_utilization: Fraction of the device's memory that the rollout may use in total, for
            weights, KV cache and workspace. The native engine uses less memory if training leaves less memory
            free. On a CPU: the fraction of all memory for the KV cache. null: 0.9 for the native engine on
            CUDA with free_cache_engine=true, otherwise 0.5.
        enforce_eager: On CUDA, launch the kernels of each step one by one instead of replaying CUDA graphs.
        block_size: Tokens per block of the KV cache.
        num_gpu_blocks_override: Number of blocks in the KV cache, regardless of the available memory. null:
            determined by memory and need. A block stores block_size tokens of all layers.
        tensor_model_parallel_size: Number of devices that split each layer of the native, vllm or sglang
            engine (tensor parallelism). If the run has more devices, more engines run in parallel on other
            samples.
        disable_log_stats: Do not write the engine's progress lines to the log.
        runner: How the native engine computes the model. fused: a decoder with fused operations. module: the
            model as transformers implements it. auto: fused if it supports the model.
    """

    name: Annotated[str, OneOf(tables.ROLLOUT_ENGINES)] = key("native", resumed="reported")
    mode: Literal["colocate", "server"] = key("colocate", when=beside("name", "vllm"), resumed="reported")
    server: ServerConfig = section(
        ServerConfig(),
        when=_ON_SERVERS,
        below={
            "weights_backend": _NEW_WEIGHTS,
            **dict.fromkeys(("weights_folder", "python", "arguments"), _SGLANG),
        },
    )
    n: int = key(1, ge=1)
    temperature: float = key(1.0, gt=0)
    stop: Names = ()
    ignore_eos: bool = False
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"] = (
        "processed_logprobs"
    )
    max_num_seqs: int = key(256, ge=1, resumed="reported")
    max_num_batched_tokens: int = key(8192, ge=1, resumed="reported")
    enable_chunked_prefill: bool = key(True, when=_NATIVE, resumed="reported")
    enable_prefix_caching: bool = key(True, when=_OWN, resumed="reported")
    gpu_memory_utilization: float | None = key(None, when=_OWN, gt=0, le=1, resumed="reported")
    enforce_eager: bool = key(False, when=_OWN, resumed="reported")
    block_size: int = key(16, when=_NATIVE, ge=1, resumed="reported")
    num_gpu_blocks_override: int | None = key(None, when=_NATIVE, ge=1, resumed="reported")
    tensor_model_parallel_size: int = key(1, ge=1, resumed="reported")
    disable_log_stats: bool = key(True, resumed="reported")
    runner: Literal["auto", "fused", "module"] = key("auto", when=_NATIVE, resumed="reported")

    @property
    def on_servers(self) -> bool:
        """Whether responses come from servers, whether the run or the user started the servers."""
        return self.name in tables.SERVER_ENGINES or (self.name == "vllm" and self.mode == "server")

    @property
    def on_named_servers(self) -> bool:
        """Whether responses come from servers that this run did not start."""
        return self.on_servers and (self.name in tables.FIXED_WEIGHTS or bool(self.server.urls))

    @property
    def split(self) -> int:
        """The number of devices of this run that split each layer of an engine."""
        return 1 if self.on_named_servers else self.tensor_model_parallel_size


class RolloutConfig(EngineConfig, LogProbSection):
    """The rollout of a training run.

    Attributes:
        n: Responses per training prompt.
        n_schedule: Responses per training prompt from certain training steps on: {step: n, …}. Before the
            first of these steps, n applies.
        max_model_len: Longest prompt and response together, in tokens. A response ends when it reaches this
            length. null: data.max_prompt_length + data.max_response_length.
        free_cache_engine: Free the memory of the engine's KV cache and weights after each generation.
        update_weights_bucket_megabytes: Size, in MiB, of the pieces in which weights are sent to a rollout in
            a different pool than the actor. A larger tensor is sent as a separate piece.
        log_prob_diff_limit: Limit of the mean difference between log-probs of sampling and of training, in
            nats. Above this limit, a message names the cause. null: 1e-7 for fp64, 1e-4 for fp32, 0.02 for
            bf16.
    """

    n: int = key(1, needs=_n_countable, ge=1)
    n_schedule: BySteps = key({}, needs=_schedule_valid)
    max_model_len: int | None = key(None, needs=_BEYOND_PROMPTS, ge=2)
    free_cache_engine: bool = key(True, resumed="reported")
    update_weights_bucket_megabytes: int = key(
        2048,
        when=When(_apart, "if actor and rollout run in different places", notice=True),
        ge=1,
        resumed="reported",
    )
    log_prob_diff_limit: float | None = key(None, gt=0, resumed="reported")
    val_kwargs: ValidationSampling = section(
        ValidationSampling(),
        when=_VALIDATES,
        below={
            **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), _DRAWN),
            "min_tokens": ends_early(),
        },
    )

    def longest(self, data: DataConfig) -> int:
        """Return the maximum length of a prompt and its response together, in tokens."""
        return min(data.longest, self.max_model_len or data.longest)

    @property
    def group_sizes(self) -> dict[int, int]:
        """A sorted dict from step to the number of responses per training prompt from this step on."""
        return {1: self.n} | dict(sorted(self.n_schedule.items()))
