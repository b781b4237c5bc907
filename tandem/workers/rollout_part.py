"""The rollout in a worker: a rollout engine, the policy whose weights it samples from, and the batch of what
it wrote."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, suppress

from tandem.config.root import TrainConfig
from tandem.engines.rollout.base import (
    SLEEP_TAGS,
    RolloutEngine,
    SharedModule,
    WeightSource,
    WeightStream,
    finished,
)
from tandem.engines.rollout.registry import stall_timeout_s
from tandem.engines.train.base import TrainEngine
from tandem.engines.weight_sync import Arrival, Digest, Sent, WeightBucket, check_arrival
from tandem.errors import EngineError
from tandem.protocol import DataProto, Request, Sample, SamplingParams
from tandem.runtime import Dispatch, Part, register
from tandem.workers.base import EngineWorker
from tandem.workers.parts import missing
from tandem.workers.samples import requests_of, rollout_batch

# A stream gives its samples in about so many parts: enough to overlap, few enough to cost nothing.
_PARTS = 4


class RolloutPart:
    """The rollout.

    Whatever way weights take, their digests are compared before anything is sampled from them.

    Args:
        config: the resolved run config.
        policy: holds the weights: the actor's engine, or a frozen one that follows an actor elsewhere.
        follows: whether it is a frozen one; see `load_weights`.
        engine: samples.
    """

    def __init__(
        self, config: TrainConfig, policy: TrainEngine, engine: RolloutEngine, *, follows: bool
    ) -> None:
        self.policy = policy
        self.engine = engine
        self._follows = follows
        self._rollout = config.actor_rollout_ref.rollout
        self._longest = self._rollout.longest(config.data)
        self._sent: dict[str, Sent] = {}  # by receiver, what it was sent last
        self._arrival = Arrival()

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, blocking=False, mesh="rollout")
    def generate_sequences(
        self, worker: EngineWorker, prompts: DataProto, n: int, params: SamplingParams, *, phase: str = "gen"
    ) -> DataProto:
        """n responses to each prompt, prompt by prompt, timed as `phase`.

        Adds `tokens`, `response_mask`, `rollout_log_probs` (and `rollout_log_probs_untruncated` where the
        sampling parameters reshape the distribution; NaN where the engine does not give them),
        `policy_version`, `token_fingerprint`, `sample`, `finish_reason`.
        """
        requests = self.requests(prompts, n, params)
        done = {sample.id: sample for part in self._written(worker, requests, phase) for sample in part}
        samples = [done[request.id] for request in requests]
        return self.batch(prompts.repeat(n), requests, samples, params)

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, stream=True, mesh="rollout")
    def stream_sequences(
        self, worker: EngineWorker, prompts: DataProto, n: int, params: SamplingParams, *, phase: str = "gen"
    ) -> Iterator[Part]:
        """The rows of `generate_sequences`, in parts of about a quarter of this worker's share, as they
        are finished. An empty share has no parts."""
        requests = self.requests(prompts, n, params)
        place = {request.id: row for row, request in enumerate(requests)}
        table = prompts.repeat(n)
        with closing(self._written(worker, requests, phase)) as parts:
            for samples in parts:
                samples.sort(key=lambda sample: place[sample.id])
                rows = [place[sample.id] for sample in samples]
                yield Part(rows, self.batch(table[rows], [requests[row] for row in rows], samples, params))

    def requests(self, prompts: DataProto, n: int, params: SamplingParams) -> list[Request]:
        """What the engine is asked for: n responses to each prompt, prompt by prompt."""
        return requests_of(prompts, n, params, self._longest)

    def _written(
        self, worker: EngineWorker, requests: list[Request], phase: str
    ) -> Generator[list[Sample], None, None]:
        """Samples as they are finished. All ranks take part in gathering the weights, whether they have
        requests or not. However it ends, the engine sleeps and the model is sharded afterwards; the
        clock stands still while the reader has the samples."""
        sampling = "generate_sequences" if phase == "gen" else f"{phase}_sequences"
        limit_s = stall_timeout_s(self._rollout)
        held = ExitStack()
        try:
            with worker.timeline.phase(phase):
                self._give_weights(worker, held)
            at_least = -(-len(requests) // _PARTS)
            parts = finished(self.engine, requests, at_least=at_least, stall_timeout_s=limit_s)
            held.enter_context(closing(parts))
            while True:
                with worker.timeline.phase(phase), worker.timeline.phase(sampling):
                    samples = next(parts, None)
                if samples is None:
                    break
                yield samples
        except (Exception, KeyboardInterrupt):
            with worker.timeline.phase(phase), suppress(EngineError):  # it comes of the first, which is told
                held.close()
            raise
        finally:
            with worker.timeline.phase(phase):
                held.close()

    def _give_weights(self, worker: EngineWorker, held: ExitStack) -> None:
        """Gives the policy's weights to the engine: the policy's own module where the engine can share it,
        unsharded while `held` is open, or until the engine has copied it; else a stream. What is trained may
        then be offloaded. An engine that takes none keeps its own.

        Raises:
            WeightSyncError: the engine holds others than it was given.
        """
        tags = SLEEP_TAGS if self._rollout.free_cache_engine else ()
        policy, engine = self.policy, self.engine
        if SharedModule in engine.takes and policy.unshards:
            lent = held.enter_context(ExitStack())
            lent.enter_context(worker.on_device(policy))
            sent = self._digest(worker)
            with worker.timeline.phase("reshard"), worker.counted_memory("perf/weight_sync_peak_bytes"):
                module = lent.enter_context(policy.unsharded())
            held.callback(engine.sleep, tags or ("weights",))  # these go when the module is sharded again
            self._update(worker, SharedModule(module, release=lent.close), sent)
        else:
            if tags:
                held.callback(engine.sleep, tags)
            if WeightStream in engine.takes:
                with worker.on_device(policy), worker.counted_memory("perf/weight_sync_peak_bytes"):
                    sent = self._digest(worker)
                    self._update(worker, WeightStream(policy.weights(dtype=policy.compute_dtype)), sent)

    def _digest(self, worker: EngineWorker) -> Sent:
        with worker.timeline.phase("weight_sync"):
            return Sent(self.policy.version, self.policy.digest())

    def _update(self, worker: EngineWorker, source: WeightSource, sent: Sent) -> None:
        with worker.timeline.phase("weight_sync"):
            self._check(worker, "engine", sent, self.engine.update_weights(source, sent.version))

    def _check(self, worker: EngineWorker, receiver: str, sent: Sent, found: Digest) -> None:
        """Counts the updates since the weights that were sent before, apart for those that changed nothing.

        Raises:
            WeightSyncError: the receiver holds others than it was sent.
        """
        before = self._sent.get(receiver)
        check_arrival(sent, found, engine=self._rollout.name, before=before)
        if before is not None and before.version != sent.version:
            name = "trust/unmoved_updates" if before.digest == sent.digest else "trust/moving_updates"
            worker.observed.add_max(name, float(sent.version - before.version))
        self._sent[receiver] = sent

    def batch(
        self, table: DataProto, requests: list[Request], samples: list[Sample], params: SamplingParams
    ) -> DataProto:
        """See `rollout_batch`; the log-probs have the type of the policy's outputs."""
        dtype = self.policy.output_dtype
        return rollout_batch(table, requests, samples, dtype=dtype, reshaped=params.reshapes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, worker: EngineWorker, bucket: WeightBucket) -> None:
        """Takes over a bucket, each rank its shards. After the last the rollout samples from these weights.

        Raises:
            EngineError: weights of another model; the policy here is the actor itself.
            WeightSyncError: a bucket was left out, or a weight is not what was sent.
        """
        if not self._follows:
            raise missing("rollout, apart from the actor", "actor and rollout over the same weights")
        self._arrival.expect(bucket)
        with worker.timeline.phase("weight_sync"):
            self.policy.load_weights(bucket.tensors.items(), bucket.version, whole=False)
            if bucket.sent is not None:
                self._check(worker, "rollout", bucket.sent, self.policy.digest())
