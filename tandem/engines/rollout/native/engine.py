"""The native rollout engine, which uses continuous batching and the trained module.

The scheduler plans a step, the runner computes the logits over the paged KV cache, and the sampler samples
the tokens. A sequence leaves the batch as soon as it has finished. If the device works in parallel with the
host, a step is launched before the host has received the tokens of the previous step. The new step reads
these tokens on the device. If a sequence had already ended, its extra token is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.device import upload
from tandem.engines.rollout.base import SLEEP_TAGS, SharedModule, SleepTag, WeightSource, WeightStream
from tandem.engines.rollout.checks import check_fits_model, check_idle
from tandem.engines.rollout.draws.rows import Rows
from tandem.engines.rollout.draws.sampler import Drawn
from tandem.engines.rollout.draws.stops import Decode
from tandem.engines.rollout.draws.written import Written
from tandem.engines.rollout.native.attention import AttentionName
from tandem.engines.rollout.native.budget import weights_message
from tandem.engines.rollout.native.flight import Flight, in_flight
from tandem.engines.rollout.native.memory import CacheRoom
from tandem.engines.rollout.native.paged import groups_of
from tandem.engines.rollout.native.plan import Index, Plan, step_input
from tandem.engines.rollout.native.records import Records
from tandem.engines.rollout.native.runner import Runner, RunnerName, make_runner
from tandem.engines.rollout.native.scheduler import Scheduler
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.engines.rollout.native.steps import Steps
from tandem.engines.rollout.native.store import Store
from tandem.engines.rollout.own_weights import ModuleEngine, OwnWeights
from tandem.engines.weight_sync import Digest, digest, module_digest
from tandem.errors import EngineError
from tandem.protocol import Request, Sample
from tandem.protocol.rollout import LogprobsMode


class NativeEngine(ModuleEngine):
    """A `RolloutEngine` in this process with continuous batching.

    Args:
        device: The device of the model.
        max_num_seqs: The maximum number of sequences that run at the same time. Fewer sequences run if the KV
            cache has too little memory.
        max_num_batched_tokens: The maximum number of tokens of one step. Decoding sequences have priority
            over prompts.
        gpu_memory_utilization: The fraction of the device's memory for the rollout. None: see `CacheRoom`.
        block_size: The number of tokens per block of the KV cache.
        num_gpu_blocks_override: The number of blocks. None means as many as the memory allows.
        enable_prefix_caching: Whether a prompt reuses the KV-cache blocks of an earlier sequence with the
            same beginning.
        enable_chunked_prefill: Whether a prompt may be computed in several steps.
        runner: "fused", "module", or "auto" for the fastest runner that supports the model.
        attention: The name of the attention kernels, or "auto" for the fastest kernels that can run.
        enforce_eager: On CUDA, launch the kernels of every step one by one instead of replaying graphs.
        run_ahead: Whether a step is launched before the host has received the last step's tokens. None means
            yes on CUDA, no elsewhere.
        logprobs_mode: Which log-probs samples store in `log_probs`.
        records_experts: Whether samples contain the experts that computed their tokens.
        split: This rank's shard of each layer. All ranks of the group must get the same requests and the same
            calls of `poll`.
        max_length: See `ModuleEngine`.
        own: See `ModuleEngine`.
        decode: See `ModuleEngine`.
        log: See `ModuleEngine`.
        say: A function that receives messages for the user. On CUDA, there is one about the memory of the
            weights, and one about the memory of the KV cache.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        max_length: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        gpu_memory_utilization: float | None = None,
        block_size: int = 16,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        runner: RunnerName = "auto",
        attention: AttentionName = "auto",
        enforce_eager: bool = False,
        run_ahead: bool | None = None,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        records_experts: bool = False,
        split: LayerSplit = WHOLE,
        own: OwnWeights | None = None,
        decode: Decode | None = None,
        log: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(max_length, own, decode, log)
        self._device = device
        cuda = device.type == "cuda"
        graphs = cuda and not enforce_eager
        room = CacheRoom(device, gpu_memory_utilization, block_size, num_gpu_blocks_override, split)
        self._store = Store(room, attention, graphs, max_num_seqs, max_length)
        self._split_steps = cuda  # whether decoding rows and prompts are computed in separate forwards
        self._run_ahead = cuda if run_ahead is None else run_ahead
        self._rows = Rows(max_num_seqs, logprobs_mode)
        self._scheduler = Scheduler(
            self._rows,
            self._counters,
            max_length=max_length,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            chunked=enable_chunked_prefill,
            caching=enable_prefix_caching,
        )
        make = partial(make_runner, runner, max_length=max_length, split=split, records=records_experts)
        self._records = Records(device)
        self._steps = Steps(make, graphs, max_num_seqs, self._scheduler.blocks.width)
        self._say = say
        self._finished: list[Sample] = []
        self._pending: dict[tuple[str, int], tuple[int, int]] = {}  # lengths of prompt and whole sequence
        self._demand_changed = False
        self._demand = 1  # blocks that the pending requests can fill together
        self._flight: Flight | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        self._check(requests, self._pending)
        prompts = {request.id: len(request.prompt_ids) for request in requests}
        added = {r.id: (prompts[r.id], prompts[r.id] + r.params.max_tokens) for r in requests}
        store, runner = self._store, self._steps.runner
        if added and (runner is not None or store.room.fixed is not None):
            per_block = 0 if runner is None else store.per_block(runner)
            store.room.check_longest(max(self._blocks(added.values())), per_block)
        self._scheduler.waiting.extend(requests)
        self._pending |= added
        self._demand_changed = True

    def pending(self) -> int:
        return len(self._pending)

    def _blocks(self, lengths: Collection[tuple[int, int]]) -> list[int]:
        """Return how many blocks sequences can fill, given the lengths of their prompts and of the whole."""
        blocks, size = self._store.room.groups.blocks, self._scheduler.block_size
        return [blocks(whole, self._scheduler.most_at_once(prompt), size) for prompt, whole in lengths]

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        """Set new weights. Running sequences continue with the new weights and keep their keys and values.

        If a weight stream fails, the engine has no weights afterwards.
        """
        self._accept_in_flight()
        if self._own is not None and isinstance(source, WeightStream):
            self._steps.release_weights()  # the stream overwrites the weights that the runner refers to
        source = self._take_source(source)
        running = list(self._rows.request[: self._rows.count])
        check_fits_model([*running, *self._scheduler.waiting], source.module.config)
        runner = self._steps.runner_of(source.module, partial(self._copies, source))
        if not self._store.is_of(runner):
            if self._rows.count:
                raise EngineError("the new weights belong to another model, but sequences are still running")
            self._drop_cache()
        self._steps.use(runner)
        self._source, self._version, self._store.room.weights = source, version, runner.weight_bytes
        self._store.room.groups = groups_of(runner.layers)
        self._scheduler.angle_limits = runner.angle_limits
        self._scheduler.forget()
        copied = None if self._store.room.split.size > 1 else runner.copied(source.module)
        found = module_digest(source.module) if copied is None else digest(copied)
        if runner.copies and source.release is not None:
            source.release()
        return found

    def _copies(self, source: SharedModule, runner: Runner) -> bool:
        """Return whether the runner should have its own copies of the weights."""
        room = self._store.room
        wanted = None if room.fixed else self._store.demand(runner)
        copies = room.copies_pay(runner.weight_bytes, wanted, returned=source.release is not None)
        if self._say is not None and self._device.type == "cuda":
            self._say(weights_message(runner.weight_bytes, copies=copies))
        return copies

    def sleep(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        """Free the KV cache and drop all references to the weights."""
        check_idle(len(self._pending))
        self._flight = None
        if "kv_cache" in tags:
            if not self._store.sleep():
                self._steps.drop_graphs()
            self._scheduler.blocks.use_cache(0)
        if "weights" in tags:
            self._steps.release_weights()
            self._drop_weights()

    def abort(self, ids: Sequence[tuple[str, int]], *, keep_partial: bool = False) -> list[Sample]:
        self._accept_in_flight()
        wanted = set(ids)
        running = self._rows.request[: self._rows.count]
        gone = np.array([request.id in wanted for request in running], dtype=bool)
        partial = [sample for sample in self._finished if sample.id in wanted]  # these samples are complete
        partial += [self._rows.sample(int(row), "abort") for row in np.flatnonzero(gone)]
        partial += [Written(request).sample("abort") for request in self._scheduler.drop_waiting(wanted)]
        self._remove(gone)
        self._finished = [sample for sample in self._finished if sample.id not in wanted]
        for id in wanted & self._pending.keys():
            del self._pending[id]
        return partial if keep_partial else []

    def poll(self, timeout_s: float) -> list[Sample]:
        """Run steps until at least one sequence has finished or the timeout is over."""
        deadline = time.monotonic() + timeout_s
        while not self._finished and (self._rows.count or self._scheduler.waiting):
            self._step()
            if time.monotonic() >= deadline:
                break
        finished, self._finished = self._finished, []
        for sample in finished:
            del self._pending[sample.id]
        return finished

    @torch.inference_mode()
    def _step(self) -> None:
        runner = self._steps.runner
        if runner is None:
            raise EngineError("the engine has no weights yet", remedy="call update_weights before poll")
        if self._demand_changed or not self._store.blocks:
            self._fit_cache(runner)
        if runner.records is not None and self._scheduler.may_preempt:
            self._accept_in_flight()  # a sequence in flight may have ended, and its blocks have the records
            if self._finished:
                return
        with self._restart_on_failure():
            plan = self._scheduler.schedule()
            assert plan is not None or self._flight is not None, "nothing can run"
            earlier = self._flight
            self._flight = None if plan is None else self._launch(plan, earlier)
            self._accept(earlier)
        if not self._run_ahead:
            self._accept_in_flight()
        running, use = self._scheduler.running, self._scheduler.use
        self._counters.line(running, self._rows.count - running + len(self._scheduler.waiting), use)

    @contextmanager
    def _restart_on_failure(self) -> Iterator[None]:
        """If a step fails inside the context, discard what it scheduled, computed and sampled."""
        try:
            yield
        except BaseException:
            self._flight = None
            self._scheduler.restart()
            raise

    def _fit_cache(self, runner: Runner) -> None:
        """Create the KV cache, or make it larger and keep its content.

        Growing needs memory for the old and the new cache together. If there is too little memory, and the
        old cache is too small for the longest sequence, the old cache is dropped first. Its sequences are
        then computed again.
        """
        store, pending = self._store, self._blocks(self._pending.values())
        self._demand = store.room.wanted(pending, store.sequences, 0, store.per_block(runner))
        blocks, possible = store.wanted(runner, pending)
        if not possible:
            self._accept_in_flight()
            self._scheduler.restart()
            self._drop_cache()
        if blocks > store.blocks:
            held = store.blocks
            if store.take(runner, blocks):
                self._steps.moved = True
            else:
                self._steps.drop_graphs()
                store.make(runner, blocks)
            if held:
                self._scheduler.blocks.pool.grow(store.blocks)
            else:
                self._scheduler.blocks.use_cache(store.blocks, store.room.groups)
            if self._say is not None and self._device.type == "cuda":  # log this only once
                self._say(store.cache_message(runner))
                self._say = None
        self._demand_changed = False

    def _drop_cache(self) -> None:
        self._store.drop()
        self._steps.drop_graphs()
        self._scheduler.blocks.use_cache(0)

    # The methods below run one step.

    def _launch(self, plan: Plan, earlier: Flight | None) -> Flight | None:
        """Run a step and sample its tokens. On CUDA, this only launches the work."""
        cache, counters = self._store.cache, self._counters
        assert cache is not None
        counters.decode_steps += plan.decoding > 0
        counters.prefill_tokens += int(plan.counts[plan.decoding :].sum())
        counters.running(self._scheduler.running)
        counters.cache(
            cache.bytes // cache.blocks * self._demand, self._scheduler.blocks.in_use / self._demand
        )
        place = in_flight(earlier, self._rows.capacity)
        runs = plan.apart() if self._split_steps else (plan,)
        parts = [self._forward(run, place, earlier) for run in runs]
        if plan.copies:
            source, target = (upload(np.array(part), self._device) for part in zip(*plan.copies, strict=True))
            cache.copy_blocks(source, target)
        if not len(plan.sampled):
            return None
        logits, uniforms_R = parts[0]
        if len(parts) > 1:
            logits, uniforms_R = (torch.cat(each) for each in zip(*parts, strict=True))
        params = self._rows.params(plan.sampled, logits.shape[1], self._device)
        ahead = (place[plan.sampled] >= 0).astype(np.int64)
        drawn = self._rows.draw(plan.sampled, logits, params, ahead, uniforms_R)
        return Flight.of(plan.sampled, drawn, self._version)

    def _forward(self, plan: Plan, place: Index, earlier: Flight | None) -> tuple[Tensor, Tensor]:
        """Return the logits of `plan.sampled` and the random numbers for sampling from the logits.

        Args:
            plan: The step, or one of the steps into which `Plan.apart` has split it.
            place: For each row, the index of its token in `earlier`, or -1 if it has none.
            earlier: The tokens of the previous step that are still in flight.
        """
        scheduler, store = self._scheduler, self._store
        assert store.attention is not None
        beside = [self._rows.uniforms(plan.sampled, (place[plan.sampled] >= 0).astype(np.int64))]
        if earlier is not None:
            beside += earlier.wanted(place[plan.rows[: plan.decoding]])
        tables, last, size = scheduler.blocks.tables, self._rows.last_token, store.room.block_size
        step, logits_of_R, (uniforms_R, *inserted) = step_input(
            plan, tables, last, scheduler.content, size, self._device, beside
        )
        if earlier is not None and plan.decoding:
            earlier.insert(step.ids_T, inserted)
        logits = self._steps.forward(step, store.attention)
        return logits if logits_of_R is None else logits[logits_of_R], uniforms_R

    def _accept(self, flight: Flight | None) -> None:
        """Fetch sampled tokens, append them, and remove the sequences that have finished."""
        if flight is None:
            return
        rows, drawn = flight.rows, flight.arrived()
        alive = rows >= 0
        if not alive.all():
            kept = torch.from_numpy(alive)
            rows, drawn = rows[alive], Drawn(*(part[kept] for part in drawn))
        done, stopped = self._rows.accept(rows, drawn, flight.version, self._decode)
        self._counters.wrote(len(rows))
        if done.any():
            reasons = np.where(stopped, "stop", "length")
            samples = [self._rows.sample(int(rows[i]), str(reasons[i])) for i in np.flatnonzero(done)]
            self._add_experts(samples, rows[done], flight)
            self._finished += samples
            gone = np.zeros(self._rows.count, dtype=bool)
            gone[rows[done]] = True
            self._remove(gone)

    def _add_experts(self, samples: Sequence[Sample], rows: Index, flight: Flight) -> None:
        """Add the recorded experts, if there are any, to the samples of rows that finished with a flight."""
        runner, cache = self._steps.runner, self._store.cache
        if runner is None or runner.records is None or cache is None:
            return
        lengths = self._scheduler.prompt_length[rows] + self._rows.produced[rows]
        slots = [
            self._scheduler.blocks.slots(row, length - 1)
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        ]
        self._records.add(samples, slots, cache, runner.records, flight.arrival)

    @torch.inference_mode()
    def _accept_in_flight(self) -> None:
        """Accept the tokens in flight."""
        flight, self._flight = self._flight, None
        with self._restart_on_failure():
            self._accept(flight)

    def _remove(self, gone: np.ndarray) -> None:
        if not gone.any():
            return
        moved, flight = self._scheduler.remove(gone), self._flight
        if flight is not None:
            flight.rows = np.where(flight.rows >= 0, moved[flight.rows], -1)
            if (flight.rows < 0).all():
                self._flight = None
