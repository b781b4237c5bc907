"""The policy: actor, rollout and reference, alone or together in one process, so that the module
that is trained can be the module that samples."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandem.config.fsdp import FSDPConfig
from tandem.config.optim import OptimConfig
from tandem.config.root import TrainConfig
from tandem.engines.rollout.base import RolloutEngine, SharedModule, finished
from tandem.engines.rollout.registry import make_rollout_engine
from tandem.engines.train.base import TrainEngine
from tandem.engines.train.fsdp import FSDPEngine
from tandem.errors import EngineError
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged, Request, Sample, SamplingParams
from tandem.protocol.shipping import Shipped
from tandem.runtime import Dispatch, Part, register
from tandem.workers.base import EngineWorker, micro_batching
from tandem.workers.losses import ActorLoss, add_rollout_gap

PolicyPart = Literal["actor", "rollout", "ref"]

# Of these the rank with most counts; of all else that a rollout engine counts, all ranks together.
_OF_THE_BUSIEST = frozenset({"decode_steps", "peak_running", "cache_bytes"})

# A stream gives its samples in about so many parts: enough to overlap, few enough to cost nothing.
_PARTS = 4


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """A policy on its way between processes.

    Attributes:
        version: the actor's.
        tensors: whole tensors by Hugging Face name, on the host.
    """

    version: int
    tensors: dict[str, Tensor]

    def __reduce__(self) -> tuple[Any, ...]:
        shipped = {name: Shipped(tensor) for name, tensor in self.tensors.items()}
        return ExportedWeights, (self.version, shipped)  # which unpickle as tensors


class ActorWorker(EngineWorker):
    """The policy's worker. A rollout without an actor holds the policy frozen and takes over the weights
    of an actor elsewhere; see `export_weights` and `load_weights`.

    Args:
        config: the resolved run config.
        parts: of "actor", "rollout" and "ref", those that live here.
        tokenizer: decodes for stop strings; its eos ends responses.
        total_steps: training steps in which it learns, for the schedule.
        updates_per_step: optimizer steps in each.
        device, run: see `EngineWorker`.
        recompute_old: whether updates read an `old_log_probs` column.
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
    ) -> None:
        name = next(part for part in ("actor", "rollout", "ref") if part in parts)
        super().__init__(run, name, device, config.trainer.timeouts.collective)
        self._config = config
        policy = config.actor_rollout_ref
        self._batching = {
            "actor": policy.rollout.log_prob_batching,
            "ref": policy.ref.log_prob_batching,
        }
        truncated = policy.rollout.top_p < 1 or policy.rollout.top_k > 0
        self.loss = ActorLoss.from_config(
            policy.actor,
            recomputed=recompute_old,
            sampled="rollout_log_probs_untruncated" if truncated else "rollout_log_probs",
        )
        if "actor" in parts:
            self._add_engine(
                "actor", policy.actor.fsdp_config, policy.actor.optim, total_steps, updates_per_step
            )
        elif "rollout" in parts:
            self._add_engine("rollout", policy.actor.fsdp_config)
        if "ref" in parts:
            self._add_engine("ref", policy.ref.fsdp_config)
        self._rollout = self._rollout_engine(tokenizer) if "rollout" in parts else None

    def _add_engine(
        self,
        role: PolicyPart,
        fsdp: FSDPConfig,
        optim: OptimConfig | None = None,
        total_steps: int = 0,
        updates_per_step: int = 1,
    ) -> None:
        policy = self._config.actor_rollout_ref
        engine = FSDPEngine(
            policy.model.path,
            kind="policy",
            model=policy.model,
            fsdp=fsdp,
            optim=optim,
            total_steps=total_steps,
            updates_per_step=updates_per_step,
            temperature=policy.rollout.temperature,
            device=self.device,
        )
        self.hold(role, engine)

    def _rollout_engine(self, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
        rollout, data = self._config.actor_rollout_ref.rollout, self._config.data
        return make_rollout_engine(
            rollout.name,
            rollout,
            tokenizer=tokenizer,
            device=self.device,
            max_length=data.max_prompt_length + data.max_response_length,
            log=self.say,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_observed(self) -> Metrics:
        """See `EngineWorker.take_observed`; with it what the rollout engine counted, `rollout/COUNTER`."""
        observed = super().take_observed()
        for name, value in self._rollout.stats().items() if self._rollout else ():
            add = observed.add_max if name in _OF_THE_BUSIEST else observed.add_sum
            add(f"rollout/{name}", value)
        return observed

    @property
    def actor(self) -> TrainEngine:
        """The policy that learns."""
        return self._engine("actor")

    def _engine(self, *roles: PolicyPart) -> TrainEngine:
        """The first of these that this worker holds."""
        for role in roles:
            if role in self.engines:
                return self.engines[role]
        raise EngineError(
            "this worker does not hold that part of the policy",
            got=f"the parts {', '.join(self.engines)}",
            expected=" or ".join(roles),
            remedy="call the method on the group whose workers were made with that part",
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate_sequences(self, prompts: DataProto, n: int, params: SamplingParams) -> DataProto:
        """n responses to each prompt, prompt by prompt.

        Adds `tokens`, `response_mask`, `rollout_log_probs` (and `rollout_log_probs_untruncated`
        where tokens were cut from the distribution), `policy_version`, `sample`, `finish_reason`.
        """
        requests = _requests(prompts, n, params)
        done = {sample.id: sample for part in self._written(requests) for sample in part}
        samples = [done[request.id] for request in requests]
        return self._batch(prompts.repeat(n), requests, samples, params)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, stream=True)
    def stream_sequences(self, prompts: DataProto, n: int, params: SamplingParams) -> Iterator[Part]:
        """The rows of `generate_sequences`, in parts of about a quarter of this worker's share, as they
        are finished. An empty share has no parts."""
        requests = _requests(prompts, n, params)
        place = {request.id: row for row, request in enumerate(requests)}
        table = prompts.repeat(n)
        with closing(self._written(requests)) as parts:
            for samples in parts:
                samples.sort(key=lambda sample: place[sample.id])
                rows = [place[sample.id] for sample in samples]
                yield Part(rows, self._batch(table[rows], [requests[row] for row in rows], samples, params))

    def _written(self, requests: list[Request]) -> Generator[list[Sample], None, None]:
        """Samples as they are finished. All ranks take part in gathering the weights, whether they have
        requests or not. However it ends, the engine sleeps and the model is sharded afterwards; the
        clock stands still while the reader has the samples."""
        engine, rollout = self._engine("actor", "rollout"), self._rollout
        if rollout is None:
            raise EngineError("this worker holds no rollout", expected="a worker made with the part rollout")
        held = ExitStack()
        try:
            with self.timeline.phase("gen"):
                held.enter_context(self.on_device(engine))
                with self.timeline.phase("reshard"):
                    module = held.enter_context(engine.unsharded())
                with self.timeline.phase("generate_sequences"):
                    held.callback(rollout.sleep)
                    rollout.update_weights(SharedModule(module), engine.version)
            parts = held.enter_context(
                closing(finished(rollout, requests, at_least=-(-len(requests) // _PARTS)))
            )
            while True:
                with self.timeline.phase("gen"), self.timeline.phase("generate_sequences"):
                    samples = next(parts, None)
                if samples is None:
                    break
                yield samples
        finally:
            with self.timeline.phase("gen"):
                held.close()

    def _batch(
        self, table: DataProto, requests: list[Request], samples: list[Sample], params: SamplingParams
    ) -> DataProto:
        dtype = self._engine("actor", "rollout").output_dtype
        return rollout_batch(table, requests, samples, dtype=dtype, truncated=params.truncated)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, balance="tokens")
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """`old_log_probs`, ragged fp32 (fp64 for an fp64 model), nats; also measures how far the rollout's
        own are from them."""
        out = self._log_probs("actor", "old_log_prob", batch)
        if "rollout_log_probs" in batch:
            name = "rollout_log_probs_untruncated"
            sampled = batch.ragged(name if name in batch else "rollout_log_probs")
            mask = batch.ragged("response_mask").values
            if len(mask):
                add_rollout_gap(self.observed, out.values, sampled.values, mask)
        return DataProto({"old_log_probs": out})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, balance="tokens")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_probs`, ragged fp32 (fp64 for an fp64 model), nats."""
        return DataProto({"ref_log_probs": self._log_probs("ref", "ref", batch)})

    def _log_probs(self, role: PolicyPart, phase: str, batch: DataProto) -> Ragged:
        engine, micro = self._engine(role), micro_batching(self._batching[role])
        with self.timeline.phase(phase), self.on_device(engine):
            return engine.forward(batch, outputs=frozenset({"log_probs"}), micro=micro).ragged("log_probs")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, collect="first", balance="tokens")
    def update_actor(self, batch: DataProto) -> Metrics:
        """One optimizer step on a mini-batch."""
        batching = self._config.actor_rollout_ref.actor.train_batching
        with self.timeline.phase("update_actor"), self.on_device(self.actor, training=True):
            return self.guarded_step(self.actor, batch, self.loss, batching, "actor")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, collect="first")
    def export_weights(self) -> ExportedWeights | None:
        """The actor's weights; None on all ranks but the first. Collective."""
        with self.timeline.phase("export_weights"), self.on_device(self.actor):
            tensors = {}
            for name, value in self.actor.weights():
                if self.rank == 0:
                    tensors[name] = value.detach().to("cpu", copy=True)
        return ExportedWeights(self.actor.version, tensors) if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, exported: ExportedWeights) -> None:
        """The rollout samples from these weights from now on; each rank takes over its shards.

        Raises:
            EngineError: weights of another model.
        """
        engine = self._engine("rollout")
        with self.timeline.phase("load_weights"), self.on_device(engine):
            engine.load_weights(exported.tensors.items(), exported.version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path) -> None:
        self.actor.save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path) -> None:
        self.actor.load(path)


def _requests(prompts: DataProto, n: int, params: SamplingParams) -> list[Request]:
    return [
        Request(uid, sample, row.numpy(), params)
        for uid, row in zip(prompts.non_tensor_batch["uid"], prompts.ragged("prompts"), strict=True)
        for sample in range(n)
    ]


def rollout_batch(
    table: DataProto,
    requests: Sequence[Request],
    samples: Sequence[Sample],
    *,
    dtype: torch.dtype,
    truncated: bool,
) -> DataProto:
    """The samples as a batch: one row a sample, prompt then response, columns aligned with `tokens`.

    Args:
        table: the prompts' other columns, already one row a sample.
        dtype: of log-probs.
        truncated: whether tokens were cut from the distributions drawn from.
    """
    prompt_lengths = torch.tensor([len(request.prompt_ids) for request in requests], dtype=torch.int64)
    response_lengths = torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int64)
    lengths = prompt_lengths + response_lengths
    pieces = [part for r, s in zip(requests, samples, strict=True) for part in (r.prompt_ids, s.token_ids)]
    ids = np.concatenate(pieces) if pieces else np.empty(0)
    tokens = Ragged.from_lengths(torch.from_numpy(ids).to(torch.int64), lengths)
    mask = tokens.with_values(tokens.positions() >= prompt_lengths.repeat_interleave(lengths))

    def on_response(columns: list[np.ndarray], dtype: torch.dtype) -> Ragged:
        values_T = torch.zeros(len(tokens.values), dtype=dtype)
        if columns:
            values_T[mask.values] = torch.from_numpy(np.concatenate(columns)).to(dtype)
        return tokens.with_values(values_T)

    batch = {
        "tokens": tokens,
        "response_mask": mask,
        "rollout_log_probs": on_response([s.log_probs for s in samples], dtype),
        "policy_version": on_response([s.versions for s in samples], torch.int32),
    }
    untruncated = [s.untruncated_log_probs for s in samples if s.untruncated_log_probs is not None]
    if truncated and len(untruncated) == len(samples):
        batch["rollout_log_probs_untruncated"] = on_response(untruncated, dtype)
    arrays: dict[str, np.ndarray | list[Any]] = {
        **table.non_tensor_batch,
        "sample": [request.sample for request in requests],
        "finish_reason": [sample.finish_reason for sample in samples],
    }
    return DataProto(batch, arrays, table.meta_info)
