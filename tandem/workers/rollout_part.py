"""The part of a worker that generates responses.

The rollout consists of a rollout engine and the policy that provides the engine's weights. It returns samples
as a batch.
"""

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

# The approximate number of parts of a stream: enough to overlap work, few enough to add no cost.
_PARTS = 4


class RolloutPart:
    """The part of a worker that generates responses with a rollout engine.

    After every weight sync, the digests of sent and received weights are compared before anything is sampled.

    Args:
        config: The resolved run config.
        policy: The training engine with the policy's weights. This is the actor's engine, or a frozen engine
            that receives the weights of an actor in another worker group.
        engine: The rollout engine.
        follows: Whether `policy` is a frozen engine; see `load_weights`.
    """

    def __init__(
        self, config: TrainConfig, policy: TrainEngine, engine: RolloutEngine, *, follows: bool
    ) -> None:
        self.policy = policy
        self.engine = engine
        self._follows = follows
        self._rollout = config.actor_rollout_ref.rollout
        self._longest = self._rollout.longest(config.data)
        self._sent: dict[str, Sent] = {}  # receiver → the last weights that were sent to it
        self._arrival = Arrival()
        self._records = config.actor_rollout_ref.actor.router_replay.mode == "R3"

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, blocking=False, mesh="rollout")
    def generate_sequences(
        self, worker: EngineWorker, prompts: DataProto, n: int, params: SamplingParams, *, phase: str = "gen"
    ) -> DataProto:
        """Generate n responses to each prompt, ordered by prompt. `phase` names the timed phase.

        The result has the further columns `tokens`, `response_mask`, `rollout_log_probs`, `policy_version`,
        `token_fingerprint`, `sample` and `finish_reason`. If the sampling parameters truncate or edit the
        distribution, the result also has `rollout_log_probs_untruncated`. This column is NaN if the engine
        does not report these log-probs. With router_replay.mode=R3, it has `routed_experts`.
        """
        requests = self.requests(prompts, n, params)
        done = {
            sample.id: sample for part in self._finished_samples(worker, requests, phase) for sample in part
        }
        samples = [done[request.id] for request in requests]
        return self.batch(prompts.repeat(n), requests, samples, params)

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, stream=True, mesh="rollout")
    def stream_sequences(
        self, worker: EngineWorker, prompts: DataProto, n: int, params: SamplingParams, *, phase: str = "gen"
    ) -> Iterator[Part]:
        """Yield the rows of `generate_sequences` in parts, as soon as they are finished.

        A part has about a quarter of this worker's rows. Without rows there are no parts.
        """
        requests = self.requests(prompts, n, params)
        place = {request.id: row for row, request in enumerate(requests)}
        table = prompts.repeat(n)
        with closing(self._finished_samples(worker, requests, phase)) as parts:
            for samples in parts:
                samples.sort(key=lambda sample: place[sample.id])
                rows = [place[sample.id] for sample in samples]
                yield Part(rows, self.batch(table[rows], [requests[row] for row in rows], samples, params))

    def requests(self, prompts: DataProto, n: int, params: SamplingParams) -> list[Request]:
        """Return the requests for the engine: n requests per prompt, ordered by prompt."""
        return requests_of(prompts, n, params, self._longest)

    def _finished_samples(
        self, worker: EngineWorker, requests: list[Request], phase: str
    ) -> Generator[list[Sample], None, None]:
        """Yield samples as they are finished.

        All ranks must call this method, with or without requests, because gathering the weights is
        collective. At the end, also after an error, the engine sleeps and the model is sharded. The time in
        which the caller handles the samples is not counted.
        """
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
            with (
                worker.timeline.phase(phase),
                suppress(EngineError),
            ):  # this is a consequence of the error raised below
                held.close()
            raise
        finally:
            with worker.timeline.phase(phase):
                held.close()

    def _give_weights(self, worker: EngineWorker, held: ExitStack) -> None:
        """Give the policy's weights to the rollout engine.

        If the engine can use the policy's module directly, the module stays unsharded while `held` is open,
        or until the engine has copied the weights. Otherwise the weights are streamed, and the trained model
        may be offloaded afterwards. An engine that cannot receive weights keeps its weights.

        Raises:
            WeightSyncError: The engine's weights differ from the sent weights.
        """
        tags = SLEEP_TAGS if self._rollout.free_cache_engine else ()
        policy, engine = self.policy, self.engine
        if SharedModule in engine.takes and policy.unshards:
            lent = held.enter_context(ExitStack())
            lent.enter_context(worker.on_device(policy))
            sent = self._digest(worker)
            with worker.timeline.phase("reshard"), worker.counted_memory("perf/weight_sync_peak_bytes"):
                module = lent.enter_context(policy.unsharded())
            held.callback(engine.sleep, tags or ("weights",))  # sharding the module frees the weights
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
        """Check the digest of received weights, and count the updates since the previous weight sync.

        The updates that changed no weight are counted separately.

        Raises:
            WeightSyncError: The receiver's weights differ from the sent weights.
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
        """Convert the samples to a batch; see `rollout_batch`.

        The log-probs of the batch have the dtype of the policy's outputs.
        """
        dtype, mixtures = self.policy.output_dtype, self.policy.mixtures if self._records else None
        return rollout_batch(
            table, requests, samples, dtype=dtype, reshaped=params.reshapes, mixtures=mixtures
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, worker: EngineWorker, bucket: WeightBucket) -> None:
        """Load a bucket of the actor's weights. Each rank copies only its shards.

        After the last bucket, the rollout samples from the new weights.

        Raises:
            EngineError: The weights belong to another model, or the policy in this worker is the actor.
            WeightSyncError: A bucket is missing, or a weight differs from the sent weight.
        """
        if not self._follows:
            raise missing("rollout, apart from the actor", "actor and rollout over the same weights")
        self._arrival.expect(bucket)
        with worker.timeline.phase("weight_sync"):
            self.policy.load_weights(bucket.tensors.items(), bucket.version, whole=False)
            if bucket.sent is not None:
                self._check(worker, "rollout", bucket.sent, self.policy.digest())
