"""The policy: actor, rollout and reference, alone or together in one process, so that the module
that is trained can be the module that samples."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import torch.distributed as dist
from transformers import AutoConfig, PreTrainedTokenizerBase

from tandem.config.actor import ActorConfig, RefConfig
from tandem.config.optim import OptimConfig
from tandem.config.root import TrainConfig
from tandem.engines.rollout.base import (
    SLEEP_TAGS,
    RolloutEngine,
    SharedModule,
    WeightSource,
    WeightStream,
    finished,
)
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.engines.rollout.registry import make_rollout_engine, stall_timeout_s
from tandem.engines.train.base import TrainEngine
from tandem.engines.train.fsdp import FSDPEngine
from tandem.engines.weight_sync import Arrival, Digest, Sent, WeightBucket, buckets, check_arrival
from tandem.errors import ConfigError, EngineError
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Request, Sample, SamplingParams
from tandem.runtime import Dispatch, Part, register
from tandem.workers.base import closed_after, seeded
from tandem.workers.correction import KEPT, without_rejected
from tandem.workers.losses import ActorLoss
from tandem.workers.probes import add_evidence, add_rollout_gap, difference_limit, gap_columns
from tandem.workers.reference import PolicyPart, ReferenceWorker
from tandem.workers.samples import requests_of, rollout_batch

# Of these the rank with most counts; of all else that a rollout engine counts, all ranks together.
_OF_THE_BUSIEST = frozenset({"decode_steps", "peak_running", "cache_bytes", "cache_use"})

# A stream gives its samples in about so many parts: enough to overlap, few enough to cost nothing.
_PARTS = 4


class ActorWorker(ReferenceWorker):
    """The policy's worker. A rollout without an actor holds the policy frozen and takes over the weights
    of an actor elsewhere, bucket by bucket; see `export_weights` and `load_weights`.

    Whatever way weights take, their digests are compared before anything is sampled from them.

    Args:
        config: the resolved run config.
        parts: of "actor", "rollout" and "ref", those that live here.
        tokenizer: decodes for stop strings; its eos ends responses.
        total_steps: training steps in which it learns, for the schedule.
        updates_per_step: optimizer steps in each.
        device, run: see `EngineWorker`.
        recompute_old: whether updates read an `old_log_probs` column.
        old_outputs: what `compute_log_prob` gives besides, of "sum_pi_squared" and "ref_kl".

    Raises:
        ConfigError: a rollout engine that takes no weights cannot follow a policy that learns.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        parts: Collection[PolicyPart],
        tokenizer: PreTrainedTokenizerBase,
        total_steps: int,
        updates_per_step: int,
        device: str,
        run: RunFolder,
        recompute_old: bool,
        old_outputs: frozenset[str] = frozenset(),
    ) -> None:
        name = next(part for part in ("actor", "rollout", "ref") if part in parts)
        super().__init__(config, run, name, device, old_outputs)
        policy = config.actor_rollout_ref
        correction = config.algorithm.rollout_correction
        self._bypasses = correction.bypass_mode
        self.loss = ActorLoss.from_config(policy.actor, recomputed=recompute_old, correction=correction)
        if "actor" in parts:
            self._add_engine("actor", policy.actor, policy.actor.optim, total_steps, updates_per_step)
        elif "rollout" in parts:
            self._add_engine("rollout", policy.actor)
        if "ref" in parts and "actor" in parts and policy.model.lora_rank:
            share = self.actor.share  # its base is the reference, and needs no second copy
            self.register_mesh("ref", share.rank, share.size, collects=share.leads)
        elif "ref" in parts:
            self._add_engine("ref", policy.ref)
        self._rollout = self._rollout_engine(tokenizer) if "rollout" in parts else None
        self._sent: dict[str, Sent] = {}  # by receiver, what it was sent last
        self._export = ExitStack()  # what is held between the first bucket and the last
        self._arrival = Arrival()

    def _add_engine(
        self,
        role: PolicyPart,
        section: ActorConfig | RefConfig,
        optim: OptimConfig | None = None,
        total_steps: int = 0,
        updates_per_step: int = 1,
    ) -> None:
        policy = self._config.actor_rollout_ref
        with seeded(self._config.trainer.seed):
            engine = FSDPEngine(
                policy.model.path,
                kind="policy",
                model=policy.model if role == "actor" else policy.model.without_adapters,
                fsdp=section.fsdp_config.undivided if role == "rollout" else section.fsdp_config,
                optim=optim,
                total_steps=total_steps,
                updates_per_step=updates_per_step,
                temperature=policy.rollout.temperature,
                sequence_parallel=1 if role == "rollout" else section.ulysses_sequence_parallel_size,
                device=self.device,
            )
        self.hold(role, engine)

    def _rollout_engine(self, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
        rollout, data = self._config.actor_rollout_ref.rollout, self._config.data
        split = self._split(rollout.tensor_model_parallel_size)
        engine = make_rollout_engine(
            rollout.name,
            rollout,
            tokenizer=tokenizer,
            device=self.device,
            max_length=data.max_prompt_length + data.max_response_length,
            share=(self.rank, self.world_size),
            split=split,
            model_path=self._config.actor_rollout_ref.model.path,
            trust_remote_code=self._config.actor_rollout_ref.model.trust_remote_code,
            dtype=self._engine("actor", "rollout").compute_dtype,
            log_file=self.run.logs / f"vllm_server_rank_{self.rank}.log",
            log=functools.partial(ActorWorker.say, weakref.proxy(self)),  # so that no engine keeps its worker
        )
        weakref.finalize(self, engine.close)
        if not engine.takes and not self._config.trainer.val_only:
            raise ConfigError(
                "this engine's weights cannot be changed, and the policy's will",
                field="actor_rollout_ref.rollout.name",
                got=rollout.name,
                expected="an engine that takes weights",
                remedy="set actor_rollout_ref.rollout.name=native, or trainer.val_only=true",
            )
        return engine

    def _split(self, size: int) -> LayerSplit:
        """Joins the workers that split the rollout engine's layers, neighbours by rank."""
        place = self.rank % size
        self.register_mesh("rollout", self.rank // size, self.world_size // size, collects=place == 0)
        if size == 1:
            return WHOLE
        groups = [dist.new_group(range(first, first + size)) for first in range(0, self.world_size, size)]
        split = LayerSplit(place, size, groups[self.rank // size])
        split.check(AutoConfig.from_pretrained(self._config.actor_rollout_ref.model.path))
        return split

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_observed(self) -> Metrics:
        """See `EngineWorker.take_observed`; with it what the rollout engine counted, `rollout/COUNTER`."""
        observed = super().take_observed()
        counted = self._rollout.stats() if self._rollout else {}
        if counted and not self.meshes()["rollout"].collects:
            return observed  # another rank has counted the same
        for name, value in counted.items():
            add = observed.add_max if name in _OF_THE_BUSIEST else observed.add_sum
            add(f"rollout/{name}", value)
        return observed

    @property
    def actor(self) -> TrainEngine:
        """The policy that learns."""
        return self._engine("actor")

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, blocking=False, mesh="rollout")
    def generate_sequences(
        self, prompts: DataProto, n: int, params: SamplingParams, *, phase: str = "gen"
    ) -> DataProto:
        """n responses to each prompt, prompt by prompt, timed as `phase`.

        Adds `tokens`, `response_mask`, `rollout_log_probs` (and `rollout_log_probs_untruncated` where the
        sampling parameters reshape the distribution; NaN where the engine does not give them),
        `policy_version`, `token_fingerprint`, `sample`, `finish_reason`.
        """
        requests = requests_of(prompts, n, params)
        done = {sample.id: sample for part in self._written(requests, phase) for sample in part}
        samples = [done[request.id] for request in requests]
        return self._batch(prompts.repeat(n), requests, samples, params)

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, stream=True, mesh="rollout")
    def stream_sequences(
        self, prompts: DataProto, n: int, params: SamplingParams, *, phase: str = "gen"
    ) -> Iterator[Part]:
        """The rows of `generate_sequences`, in parts of about a quarter of this worker's share, as they
        are finished. An empty share has no parts."""
        requests = requests_of(prompts, n, params)
        place = {request.id: row for row, request in enumerate(requests)}
        table = prompts.repeat(n)
        with closing(self._written(requests, phase)) as parts:
            for samples in parts:
                samples.sort(key=lambda sample: place[sample.id])
                rows = [place[sample.id] for sample in samples]
                yield Part(rows, self._batch(table[rows], [requests[row] for row in rows], samples, params))

    def _written(self, requests: list[Request], phase: str) -> Generator[list[Sample], None, None]:
        """Samples as they are finished. All ranks take part in gathering the weights, whether they have
        requests or not. However it ends, the engine sleeps and the model is sharded afterwards; the
        clock stands still while the reader has the samples."""
        rollout = self._rollout
        if rollout is None:
            raise EngineError("this worker holds no rollout", expected="a worker made with the part rollout")
        sampling = "generate_sequences" if phase == "gen" else f"{phase}_sequences"
        limit_s = stall_timeout_s(self._config.actor_rollout_ref.rollout)
        with closed_after(ExitStack(), lambda: self.timeline.phase(phase)) as held:
            with self.timeline.phase(phase):
                self._give_weights(rollout, held)
            at_least = -(-len(requests) // _PARTS)
            parts = finished(rollout, requests, at_least=at_least, stall_timeout_s=limit_s)
            held.enter_context(closing(parts))
            while True:
                with self.timeline.phase(phase), self.timeline.phase(sampling):
                    samples = next(parts, None)
                if samples is None:
                    break
                yield samples

    def _give_weights(self, rollout: RolloutEngine, held: ExitStack) -> None:
        """The policy's weights to the engine: its own module where the engine can share it, unsharded while
        `held` is open; else a stream, after which what is trained may be offloaded. An engine that takes
        none keeps its own.

        Raises:
            WeightSyncError: the engine holds others than it was given.
        """
        tags = SLEEP_TAGS if self._config.actor_rollout_ref.rollout.free_cache_engine else ()
        engine = self._engine("actor", "rollout")
        if SharedModule in rollout.takes and engine.unshards:
            held.enter_context(self.on_device(engine))
            sent = self._digest(engine)
            with self.timeline.phase("reshard"), self.counted_memory("perf/weight_sync_peak_bytes"):
                module = held.enter_context(engine.unsharded())
            held.callback(rollout.sleep, tags or ("weights",))  # these go when the module is sharded again
            self._update(rollout, SharedModule(module), sent)
        else:
            if tags:
                held.callback(rollout.sleep, tags)
            if WeightStream in rollout.takes:
                with self.on_device(engine), self.counted_memory("perf/weight_sync_peak_bytes"):
                    sent = self._digest(engine)
                    self._update(rollout, WeightStream(engine.weights(dtype=engine.compute_dtype)), sent)

    def _digest(self, engine: TrainEngine) -> Sent:
        with self.timeline.phase("weight_sync"):
            return Sent(engine.version, engine.digest())

    def _update(self, rollout: RolloutEngine, source: WeightSource, sent: Sent) -> None:
        with self.timeline.phase("weight_sync"):
            self._check("engine", sent, rollout.update_weights(source, sent.version))

    def _check(self, receiver: str, sent: Sent, found: Digest) -> None:
        """
        Raises:
            WeightSyncError: the receiver holds others than it was sent.
        """
        name = self._config.actor_rollout_ref.rollout.name
        check_arrival(sent, found, engine=name, before=self._sent.get(receiver))
        self._sent[receiver] = sent

    def _batch(
        self, table: DataProto, requests: list[Request], samples: list[Sample], params: SamplingParams
    ) -> DataProto:
        dtype = self._engine("actor", "rollout").output_dtype
        return rollout_batch(table, requests, samples, dtype=dtype, reshaped=params.reshapes)

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, mesh="actor", blocking=False, balance="tokens")
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """`old_log_probs`, ragged fp32 (fp64 for an fp64 model), nats; also measures how far the rollout's
        own are from them. With it what `old_outputs` names: `sum_pi_squared`, and `ref_kl`, nats, for which
        the batch needs `ref_hidden`."""
        computed = self._computed("actor", "old_log_prob", batch)
        out = computed.ragged("log_probs")
        columns = {name: batch.ragged(name).values for name in gap_columns(batch)}
        if columns and len(out.values) and self.actor.share.leads:
            add_rollout_gap(self.observed, out.values, columns, batch.ragged("response_mask").values)
            self._add_evidence(batch)
        others = {name: column for name, column in computed.batch.items() if name != "log_probs"}
        return DataProto({"old_log_probs": out, **others})

    def _add_evidence(self, batch: DataProto) -> None:
        rollout = self._config.actor_rollout_ref.rollout
        limit = difference_limit(rollout.log_prob_diff_limit, self.actor.compute_dtype, rollout.temperature)
        add_evidence(self.observed, batch, self.actor.version, limit)

    @register(
        dispatch_mode=Dispatch.ND_COMPUTE_PROTO,
        mesh="actor",
        blocking=False,
        collect="first",
        balance="tokens",
    )
    def update_actor(
        self, batch: DataProto, *, first: bool = False, entropy_coeff: float | None = None
    ) -> Metrics:
        """One optimizer step on a mini-batch. Where its log-probs are the first under the policy that
        sampled, it also measures how far the rollout's own are from them.

        Args:
            first: whether no update on the same batch came before.
            entropy_coeff: of the entropy bonus; None: the config's.
        """
        config, loss = self._config.actor_rollout_ref.actor, self.loss
        if entropy_coeff is not None:
            loss = loss.with_entropy_coeff(entropy_coeff)
        if not loss.recomputed or (first and self._bypasses):
            loss = replace(loss, compared=gap_columns(batch))
        if loss.compared and len(batch) and self.actor.share.leads:
            self._add_evidence(batch)
        with self.timeline.phase("update_actor"), self.on_device(self.actor, training=True):
            batching, optim = config.train_batching, config.optim
            rejects = KEPT in batch or loss.rejects
            batch = without_rejected(batch)
            return self.guarded_step(self.actor, batch, loss, batching, "actor", optim, rejects=rejects)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, collect="first")
    def weight_buckets(self) -> int:
        """How many buckets `export_weights` packs the weights in."""
        return len(self._buckets())

    def _buckets(self) -> list[tuple[str, ...]]:
        size = self.actor.compute_dtype.itemsize
        sizes = {name: shape.numel() * size for name, shape in self.actor.weight_shapes.items()}
        return buckets(sizes, self._config.actor_rollout_ref.rollout.update_weights_bucket_megabytes * 2**20)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, collect="first")
    def export_weights(self, number: int) -> WeightBucket | None:
        """A bucket of the actor's weights in compute dtype, to be asked for in order from 0; None on all
        ranks but the first. Collective."""
        packed, actor = self._buckets(), self.actor
        last = number == len(packed) - 1
        with self.timeline.phase("weight_sync"):
            if number == 0:
                self._export.close()
                self._export.enter_context(self.on_device(actor))
            tensors = {}
            for name, value in actor.weights(dtype=actor.compute_dtype, names=packed[number]):
                if self.rank == 0:
                    tensors[name] = value.to("cpu", copy=self.world_size == 1)  # where it may be the actor's
            sent = Sent(actor.version, actor.digest()) if last else None
            if last:
                self._export.close()
        return WeightBucket(number, len(packed), actor.version, tensors, sent) if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, bucket: WeightBucket) -> None:
        """Takes over a bucket, each rank its shards. After the last the rollout samples from these weights.

        Raises:
            EngineError: weights of another model.
            WeightSyncError: a bucket was left out, or a weight is not what was sent.
        """
        engine = self._engine("rollout")
        self._arrival.expect(bucket)
        with self.timeline.phase("weight_sync"):
            engine.load_weights(bucket.tensors.items(), bucket.version, whole=False)
            if bucket.sent is not None:
                self._check("rollout", bucket.sent, engine.digest())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, collect="first")
    def weight_digest(self) -> Digest:
        """That of the policy that learns, in compute dtype."""
        return self.actor.digest()

    def trained(self) -> TrainEngine:
        """See `EngineWorker.trained`."""
        return self.actor
