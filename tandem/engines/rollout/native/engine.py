"""The native rollout engine: continuous batching over the very module that is trained.

A step admits waiting prompts (prefill once per prompt, copied to the rows of its samples), then decodes
one token for every running row. Finished rows leave at once. The order of everything follows from
the order of submission; no clock decides it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.engines.rollout.base import SLEEP_TAGS, SharedModule, SleepTag, WeightSource
from tandem.engines.rollout.checks import check_fits_model, check_new, shared_module
from tandem.engines.rollout.counters import Counters
from tandem.engines.rollout.native.cache import (
    COLUMN_STEP,
    KVCache,
    Prefill,
    area,
    bytes_per_token,
    decode_rows,
    round_up,
    spans,
)
from tandem.engines.rollout.native.memory import cache_budget, check_free
from tandem.engines.rollout.native.runner import Runner, RunnerName, make_runner
from tandem.engines.rollout.native.waiting import Admission, Waiting, rectangles
from tandem.engines.rollout.rows import Rows, empty_sample
from tandem.engines.rollout.sampler import RowParams
from tandem.engines.rollout.stops import Decode
from tandem.engines.weight_sync import Digest, digest
from tandem.errors import EngineError
from tandem.protocol import Request, Sample

# Rows are put in falling order of length again once their spans are this much wider than need be,
# and not before so many steps have passed.
_SORT_GAIN = 1.25
_SORT_EVERY = 16


class NativeEngine:
    """A `RolloutEngine` in this process.

    Args:
        max_length: tokens of prompt and response together, at most.
        max_num_seqs: sequences that run at the same time, at most; fewer if the cache's memory binds.
        max_num_batched_tokens: prompt tokens of one step; a longer prompt runs alone.
        gpu_memory_utilization: share of the device's memory (on a host: of what is available).
        runner: "fused", "module", or "auto".
        decode: token ids to text, for stop strings.
        log: receives a line about every two seconds of work; None for none.
    """

    takes = frozenset({SharedModule})

    def __init__(
        self,
        *,
        device: torch.device,
        max_length: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        gpu_memory_utilization: float = 0.5,
        runner: RunnerName = "auto",
        decode: Decode | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._device = device
        self._max_length = max_length
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._utilization = gpu_memory_utilization
        self._runner_name: RunnerName = runner
        self._decode = decode
        self._counters = Counters(log)
        self._waiting = Waiting()
        self._rows = Rows(max_num_seqs)
        self._finished: list[Sample] = []
        self._known: set[tuple[str, int]] = set()
        self._source: SharedModule | None = None
        self._runner: Runner | None = None
        self._cache: KVCache | None = None
        self._version = 0
        self._longest = 0
        self._budget: int | None = None
        self._params: RowParams | None = None
        self._steps_since_sort = 0

    def submit(self, requests: Sequence[Request]) -> None:
        check_new(requests, self._known, self._max_length, self._decode is not None)
        if self._source is not None:
            check_fits_model(requests, self._source.module)
        self._waiting.add(requests)
        self._known.update(request.id for request in requests)
        lengths = (len(request.prompt_ids) + request.params.max_tokens for request in requests)
        self._longest = max(self._longest, max(lengths, default=0))

    def pending(self) -> int:
        return len(self._known)

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        """Sequences that are running go on under the new weights, over the keys and values they have."""
        source = shared_module(source)
        check_fits_model(list(self._waiting), source.module)
        self._runner = make_runner(self._runner_name, source.module, self._max_length)
        self._source = source
        self._version = version
        self._waiting.forget_prefills()
        cache = self._cache
        if cache is not None and (cache.layers, cache.mask.dtype) != (
            self._runner.layers,
            self._runner.dtype,
        ):
            if self._rows.count:
                raise EngineError("the new weights are of another model while sequences are running")
            self._cache = None
        return digest(source.module.named_parameters())

    def sleep(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        """Gives back the cache and every reference to the weights."""
        if self._known:
            raise EngineError(
                "requests are pending", got=f"{len(self._known)} requests", remedy="poll or abort them"
            )
        self._cache = self._runner = self._source = self._params = self._budget = None
        self._longest = self._steps_since_sort = 0  # each phase starts alike, whatever ran before it

    def wake(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        """The cache is made by the first step."""

    def close(self) -> None:
        """It lives in this process and has nothing to end."""

    def stats(self) -> dict[str, float]:
        return self._counters.take()

    def progress(self) -> int:
        return self._counters.written

    def abort(self, ids: Sequence[tuple[str, int]], *, keep_partial: bool = False) -> list[Sample]:
        wanted = set(ids)
        gone = np.array(
            [request.id in wanted for request in self._rows.request[: self._rows.count]], dtype=bool
        )
        partial = [self._rows.sample(int(row), "abort") for row in np.flatnonzero(gone)]
        dropped = self._waiting.drop(wanted)
        partial += [empty_sample(request) for request in dropped]
        self._finished = [sample for sample in self._finished if sample.id not in wanted]
        self._known -= wanted
        if gone.any():
            with torch.inference_mode():
                self._remove(gone)
        return partial if keep_partial else []

    def poll(self, timeout_s: float) -> list[Sample]:
        """Returns as soon as at least one sequence has finished."""
        deadline = time.monotonic() + timeout_s
        with torch.inference_mode():
            while not self._finished and (self._rows.count or len(self._waiting)):
                self._step()
                if time.monotonic() >= deadline:
                    break
        finished, self._finished = self._finished, []
        self._known -= {sample.id for sample in finished}
        return finished

    def _step(self) -> None:
        runner = self._runner
        if runner is None:
            raise EngineError("the engine has no weights", remedy="call update_weights before poll")
        if len(self._waiting):
            self._admit(runner)
        if self._rows.count:
            self._decode_step(runner)
        self._log_line()

    def _admit(self, runner: Runner) -> None:
        """Fills free rows with waiting requests. While others run, it waits until a sixteenth of the rows
        is free: prefills made one by one would cost more than the idle rows."""
        cache = self._room(runner)
        free = 0 if cache is None else cache.rows - self._rows.count
        if cache is None or (self._rows.count and free < min(-(-cache.rows // 16), len(self._waiting))):
            return
        admissions = self._waiting.admit(free, self._max_num_batched_tokens)
        for admission in admissions:
            if admission.prompt.prefill is not None:
                self._start([admission], admission.prompt.prefill, cache)
        for batch in rectangles([a for a in admissions if a.prompt.prefill is None]):
            self._start(batch, self._prefill(runner, batch), cache)

    def _room(self, runner: Runner) -> KVCache | None:
        """The cache, with as many rows as running and waiting requests want and memory and max_num_seqs
        allow. None while more sequences run than fit once the longest request is among them."""
        cache, wanted = self._cache, self._rows.count + len(self._waiting)
        most = min(self._max_num_seqs, self._rows_that_fit(runner))
        if self._rows.count > most:
            return None
        if cache is None:
            self._cache = KVCache(runner.layers, min(decode_rows(wanted), most), runner.dtype, runner.device)
        elif cache.rows > most or cache.rows < min(wanted, most):
            self._cache = cache.resized(min(max(decode_rows(wanted), 2 * cache.rows), most))
        return self._cache

    def _rows_that_fit(self, runner: Runner) -> int:
        """Sequences of the longest request's length that the memory allowed to the cache can hold."""
        columns = round_up(self._longest, COLUMN_STEP)
        if self._budget is None:
            self._budget = cache_budget(runner.device, self._utilization)
        per_token = bytes_per_token(runner.layers, runner.dtype)
        rows = self._budget // (per_token * columns)
        wanted = min(rows, self._max_num_seqs, self._rows.count + len(self._waiting))
        if self._cache is None:
            check_free(runner.device, wanted * per_token * columns)
        if rows == 0:
            fits = self._budget // per_token // COLUMN_STEP * COLUMN_STEP
            raise EngineError(
                "the cache is too small for one sequence",
                field="actor_rollout_ref.rollout.gpu_memory_utilization",
                got=f"{self._utilization}: {self._budget / 2**20:,.1f} MiB",
                expected=f"{per_token * columns / 2**20:,.1f} MiB for {columns} tokens",
                remedy=f"a sequence of {fits} tokens would fit; or raise the share of memory",
            )
        return rows

    def _prefill(self, runner: Runner, batch: Sequence[Admission]) -> Prefill:
        prompts = [admission.prompt.prompt_ids for admission in batch]
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        ids = np.zeros((len(prompts), lengths.max()), dtype=np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        self._counters.prefill_tokens += int(lengths.sum())
        return runner.prefill(self._to_device(ids), self._to_device(lengths))

    def _start(self, batch: Sequence[Admission], prefill: Prefill, cache: KVCache) -> None:
        """Gives rows to admitted requests, copies their prompts there and samples their first tokens. What
        samples left behind will need of the prefill is kept with their prompt."""
        source, requests = [], []
        for index, admission in enumerate(batch):
            source += [index] * len(admission.requests)
            requests += admission.requests
            if admission.prompt.requests and admission.prompt.prefill is None:
                admission.prompt.prefill = prefill.prompt(index)
        rows = self._rows.add(requests)
        self._params = None
        self._counters.running(self._rows.count)
        source_S = self._to_device(np.array(source, dtype=np.int64))
        cache.store(prefill, source_S, self._to_device(rows), self._to_device(self._rows.context[rows]))
        logits_SV = prefill.logits_BV[source_S]
        self._take(rows, logits_SV, self._rows.params(rows, logits_SV.shape[1], self._device))

    def _decode_step(self, runner: Runner) -> None:
        """One token for every running row. Rows that only round up the count hold nothing."""
        cache, table = self._cache, self._rows
        assert cache is not None
        self._sort(cache)
        count = table.count
        inputs = np.zeros((2, min(decode_rows(count), cache.rows)), dtype=np.int64)
        inputs[0, :count], inputs[1, :count] = table.last_token[:count], table.context[:count]
        inputs[1, count:] = table.context[count - 1]  # so that they do not widen a span
        logits_RV = runner.decode(self._to_device(inputs[0]), cache.plan(inputs[1]), cache)
        table.context[:count] += 1
        if self._params is None:
            self._params = table.params(np.arange(count), logits_RV.shape[1], self._device)
        self._counters.decode_steps += 1
        self._counters.cache_bytes = max(self._counters.cache_bytes, cache.bytes)
        self._take(np.arange(count), logits_RV[:count], self._params)

    def _take(self, rows: np.ndarray, logits_RV: Tensor, params: RowParams) -> None:
        """Samples a token for each of `rows` and lets those leave that it finishes."""
        done, stopped = self._rows.take(rows, logits_RV, params, self._version, self._decode)
        self._counters.wrote(len(rows))
        if done.any():
            reasons = np.where(stopped, "stop", "length")
            self._finished += [self._rows.sample(int(rows[i]), str(reasons[i])) for i in np.flatnonzero(done)]
            gone = np.zeros(self._rows.count, dtype=bool)
            gone[rows[done]] = True
            self._remove(gone)

    def _remove(self, gone: np.ndarray) -> None:
        source, target = self._rows.remove(gone)
        self._params = None
        if len(source):
            self._move(source, target)

    def _move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Repeats in the cache a move of rows already made in the table."""
        assert self._cache is not None
        columns = int(self._rows.context[target].max())
        self._cache.move(self._to_device(source), self._to_device(target), columns)

    def _sort(self, cache: KVCache) -> None:
        """Every few steps, puts rows in falling order of length if their attention spans would shrink."""
        self._steps_since_sort += 1
        count = self._rows.count
        if self._steps_since_sort < _SORT_EVERY:
            return
        self._steps_since_sort = 0
        needed = self._rows.context[:count] + 1
        order = np.argsort(-needed, kind="stable")
        if area(spans(needed)) < _SORT_GAIN * area(spans(needed[order])):
            return
        target = np.flatnonzero(order != np.arange(count))
        self._rows.move(order[target], target)
        self._params = None
        self._move(order[target], target)

    def _log_line(self) -> None:
        cache = self._cache
        used = (
            0.0
            if cache is None
            else self._rows.context[: self._rows.count].sum() / (cache.rows * cache.columns)
        )
        self._counters.line(self._rows.count, len(self._waiting), used)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
