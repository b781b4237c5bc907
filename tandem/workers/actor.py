"""The policy: actor, rollout and reference, alone or together in one process, so that the module
that is trained is the module that samples."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.actor import ActorConfig
from tandem.config.batching import Batching
from tandem.config.model import ModelConfig
from tandem.config.root import TrainConfig
from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.registry import make_rollout_engine
from tandem.engines.train.fsdp import FSDPEngine
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged, Request, Sample, SamplingParams
from tandem.runtime import Dispatch, register
from tandem.workers.base import EngineWorker, micro_batching
from tandem.workers.losses import ActorLoss, add_rollout_gap


class ActorWorker(EngineWorker):
    """The policy's worker.

    Args:
        config: the resolved run config.
        tokenizer: decodes for stop strings; its eos ends responses.
        total_steps: training steps in which it learns, for the schedule.
        updates_per_step: optimizer steps in each.
        device: where the models live.
        run: the run folder.
        recompute_old: whether updates read an `old_log_probs` column.
        with_reference: whether to hold the reference policy too.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        total_steps: int,
        updates_per_step: int,
        device: torch.device,
        run: RunFolder,
        recompute_old: bool,
        with_reference: bool,
    ) -> None:
        super().__init__(run, "actor", device)
        part = config.actor_rollout_ref
        self.actor_config: ActorConfig = part.actor
        self.log_prob_batching = part.rollout.log_prob_batching
        self.ref_batching = part.ref.log_prob_batching
        truncated = part.rollout.top_p < 1 or part.rollout.top_k > 0
        self.loss = ActorLoss.from_config(
            part.actor,
            recomputed=recompute_old,
            sampled="rollout_log_probs_untruncated" if truncated else "rollout_log_probs",
        )
        self.actor = FSDPEngine(
            part.model.path,
            kind="policy",
            model=part.model,
            fsdp=part.actor.fsdp_config,
            optim=part.actor.optim,
            total_steps=total_steps,
            updates_per_step=updates_per_step,
            temperature=part.rollout.temperature,
            device=device,
        )
        self.actor.offload()
        self.reference = self._reference(config, part.model, device) if with_reference else None
        self.rollout = make_rollout_engine(
            part.rollout.name,
            part.rollout,
            tokenizer=tokenizer,
            device=device,
            max_length=config.data.max_prompt_length + config.data.max_response_length,
            log=self.say,
        )

    def _reference(self, config: TrainConfig, model: ModelConfig, device: torch.device) -> FSDPEngine:
        engine = FSDPEngine(
            model.path,
            kind="policy",
            model=model,
            fsdp=config.actor_rollout_ref.ref.fsdp_config,
            optim=None,
            total_steps=0,
            temperature=config.actor_rollout_ref.rollout.temperature,
            device=device,
        )
        engine.offload()
        return engine

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate_sequences(self, prompts: DataProto, n: int, params: SamplingParams) -> DataProto:
        """n responses to each prompt, prompt by prompt.

        Adds `tokens`, `response_mask`, `rollout_log_probs` (and `rollout_log_probs_untruncated`
        where tokens were cut from the distribution), `policy_version`, `sample`, `finish_reason`.
        """
        requests = [
            Request(uid, sample, row.numpy(), params)
            for uid, row in zip(prompts.non_tensor_batch["uid"], prompts.ragged("prompts"), strict=True)
            for sample in range(n)
        ]
        with self.timeline.phase("gen"), self.on_device(self.actor), ExitStack() as unsharded:
            with self.timeline.phase("reshard"):
                module = unsharded.enter_context(self.actor.unsharded())
            with self.timeline.phase("generate_sequences"):
                self.rollout.update_weights(SharedModule(module), self.actor.version)
                samples = generate(self.rollout, requests)
                self.rollout.sleep()
        for name, value in self.rollout.stats().items():
            self.observed.add_sum(f"rollout/{name}", value)
        return rollout_batch(prompts.repeat(n), requests, samples)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """`old_log_probs`, ragged fp32, nats; also measures how far the rollout's own are from them."""
        with self.timeline.phase("old_log_prob"), self.on_device(self.actor):
            out = self._log_probs(self.actor, batch, self.log_prob_batching)
        if "rollout_log_probs" in batch:
            name = "rollout_log_probs_untruncated"
            sampled = batch.ragged(name if name in batch else "rollout_log_probs")
            mask = batch.ragged("response_mask").values
            if len(mask):
                add_rollout_gap(self.observed, out.values, sampled.values, mask)
        return DataProto({"old_log_probs": out})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_probs`, ragged fp32, nats."""
        assert self.reference is not None, "this worker was made without a reference"
        with self.timeline.phase("ref"), self.on_device(self.reference):
            return DataProto({"ref_log_probs": self._log_probs(self.reference, batch, self.ref_batching)})

    @staticmethod
    def _log_probs(engine: FSDPEngine, batch: DataProto, batching: Batching) -> Ragged:
        out = engine.forward(batch, outputs=frozenset({"log_probs"}), micro=micro_batching(batching))
        return out.ragged("log_probs")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, collect="first")
    def update_actor(self, batch: DataProto) -> Metrics:
        """One optimizer step on a mini-batch."""
        with self.timeline.phase("update_actor"), self.on_device(self.actor, training=True):
            return self.guarded_step(self.actor, batch, self.loss, self.actor_config.train_batching, "actor")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path) -> None:
        self.actor.save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path) -> None:
        self.actor.load(path)


def rollout_batch(table: DataProto, requests: list[Request], samples: list[Sample]) -> DataProto:
    """The samples as a batch: one row a sample, prompt then response, columns aligned with `tokens`.

    Args:
        table: the prompts' other columns, already one row a sample.
    """
    prompt_lengths = torch.tensor([len(request.prompt_ids) for request in requests])
    response_lengths = torch.tensor([len(sample.token_ids) for sample in samples])
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
        "rollout_log_probs": on_response([s.log_probs for s in samples], torch.float32),
        "policy_version": on_response([s.versions for s in samples], torch.int32),
    }
    untruncated = [s.untruncated_log_probs for s in samples if s.untruncated_log_probs is not None]
    if requests and requests[0].params.truncated and len(untruncated) == len(samples):
        batch["rollout_log_probs_untruncated"] = on_response(untruncated, torch.float32)
    arrays: dict[str, np.ndarray | list[Any]] = {
        **table.non_tensor_batch,
        "sample": [request.sample for request in requests],
        "finish_reason": [sample.finish_reason for sample in samples],
    }
    return DataProto(batch, arrays, table.meta_info)
