"""The worker for the policy. It runs actor, rollout and reference, alone or together in one process.

If actor and rollout are in one process, the trained module can also be used for sampling.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from tandem.config.actor import ActorConfig, RefConfig, reference_name
from tandem.config.optim import OptimConfig
from tandem.config.root import TrainConfig
from tandem.engines.rollout.base import RolloutEngine
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.engines.rollout.registry import make_rollout_engine
from tandem.engines.train.base import MicroBatching, TrainEngine
from tandem.engines.train.fsdp import FSDPEngine
from tandem.errors import ConfigError
from tandem.models.loading import load_config
from tandem.models.routing import ROUTED
from tandem.models.vocabulary import check_vocabulary
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.runtime import Dispatch, register
from tandem.workers.actor_part import ActorPart
from tandem.workers.base import EngineWorker, seeded
from tandem.workers.parts import PolicyPart, offers
from tandem.workers.reference_part import ReferencePart
from tandem.workers.rollout_part import RolloutPart

# Counters of the rollout engine whose maximum over ranks is reported. All other counters are summed.
_MAX_OVER_RANKS = frozenset({"decode_steps", "peak_running", "cache_bytes", "cache_use"})


@offers(actor=ActorPart, rollout=RolloutPart, ref=ReferencePart)
class ActorWorker(EngineWorker):
    """The worker for the policy. Its parts (actor, rollout, reference) provide its methods.

    A worker with a rollout but without an actor holds a frozen copy of the policy. This copy receives the
    weights of the actor in another worker group, one bucket after another. See `export_weights` and
    `load_weights`.

    A subclass may override methods, or use another class for a part.

    Args:
        config: The resolved run config.
        parts: The parts in this worker, from "actor", "rollout" and "ref".
        tokenizer: The tokenizer. It decodes text to find stop strings, and its eos token ends responses.
        total_steps: The number of training steps, for the learning rate schedule.
        updates_per_step: The number of optimizer steps per training step.
        device: See `EngineWorker`.
        run: See `EngineWorker`.
        recompute_old: Whether updates read an `old_log_probs` column.
        old_outputs: The further outputs of `compute_log_prob`, chosen from "sum_pi_squared", "ref_kl" and
            "entropy".
        reference: The name of the reference policy of the part "ref", if the config has several.

    Raises:
        ModelError: The vocabulary of a reference policy differs from that of the policy, or the choice of
            experts shall be replayed but cannot be recorded.
        ConfigError: The rollout engine cannot receive weights, but the policy is trained.
    """

    actor_part = ActorPart
    rollout_part = RolloutPart
    reference_part = ReferencePart

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
        reference: str = "ref",
    ) -> None:
        name = next(part for part in ("actor", "rollout", "ref") if part in parts)
        track = reference if name == "ref" else name
        super().__init__(run, track, device, config.trainer.timeouts.collective)
        self._config = config
        self.parts: dict[PolicyPart, Any] = {}
        policy = config.actor_rollout_ref
        if "actor" in parts:
            optim = policy.actor.optim
            engine = self._add_engine("actor", policy.actor, optim, total_steps, updates_per_step)
            if policy.actor.router_replay.mode != "disabled":
                self._check_experts(engine)
            self.parts["actor"] = self.actor_part(
                config, engine, recompute_old=recompute_old, old_outputs=old_outputs
            )
        elif "rollout" in parts:
            engine = self._add_engine("rollout", policy.actor)
        if "ref" in parts:
            borrowed = "actor" in parts and policy.model.lora_rank > 0  # its base is the reference
            if borrowed:
                self.register_mesh("ref", engine.share.rank, engine.share.size, collects=engine.share.leads)
            own = engine if borrowed else self._reference_engine(tokenizer, reference)
            named = {} if reference == "ref" else {"role": reference}
            self.parts["ref"] = self.reference_part(config, own, borrowed=borrowed, **named)
        if "rollout" in parts:
            sampler = self._rollout_engine(tokenizer, engine)
            self.parts["rollout"] = self.rollout_part(config, engine, sampler, follows="actor" not in parts)

    def _add_engine(
        self,
        role: PolicyPart,
        section: ActorConfig | RefConfig,
        optim: OptimConfig | None = None,
        total_steps: int = 0,
        updates_per_step: int = 1,
        path: str | None = None,
    ) -> TrainEngine:
        policy = self._config.actor_rollout_ref
        with seeded(self._config.trainer.seed):
            engine = FSDPEngine(
                path or policy.model.path,
                kind="policy",
                model=policy.model if role == "actor" else policy.model.without_adapters,
                fsdp=section.fsdp_config.undivided if role == "rollout" else section.fsdp_config,
                optim=optim,
                total_steps=total_steps,
                updates_per_step=updates_per_step,
                temperature=policy.rollout.temperature,
                sequence_parallel=1 if role == "rollout" else section.ulysses_sequence_parallel_size,
                device=self.device,
                say=self.say_for(role),
            )
        return self.hold(role, engine)

    def _check_experts(self, engine: TrainEngine) -> None:
        """Check that the model's choice of experts can be recorded, with one token.

        Raises:
            ModelError: It cannot be recorded.
        """
        token = DataProto({"tokens": Ragged.from_list([[0]], dtype=torch.int64)})
        with self.on_device(engine):
            engine.forward(token, outputs=frozenset({ROUTED}), micro=MicroBatching())

    def _reference_engine(self, tokenizer: PreTrainedTokenizerBase, reference: str) -> TrainEngine:
        policy = self._config.actor_rollout_ref
        path, remote = policy.ref.references[reference].path, policy.model.trust_remote_code
        if path is not None:
            check_vocabulary(
                path,
                load_config(path, trust_remote_code=remote).get_text_config().vocab_size,
                tokenizer,
                field=f"actor_rollout_ref.ref.models.{reference_name(reference)}.path",
                trust_remote_code=remote,
            )
        return self._add_engine("ref", policy.ref, path=path)

    def _rollout_engine(self, tokenizer: PreTrainedTokenizerBase, policy: TrainEngine) -> RolloutEngine:
        model, rollout = self._config.actor_rollout_ref.model, self._config.actor_rollout_ref.rollout
        say = functools.partial(ActorWorker.say, weakref.proxy(self))  # a weak reference to the worker
        engine = make_rollout_engine(
            rollout.name,
            rollout,
            tokenizer=tokenizer,
            device=self.device,
            max_length=rollout.longest(self._config.data),
            share=(self.rank, self.world_size),
            split=self._split(rollout.split),
            model_path=model.path,
            trust_remote_code=model.trust_remote_code,
            dtype=policy.compute_dtype,
            records_experts=self._config.actor_rollout_ref.actor.router_replay.mode == "R3",
            log_file=self.run.logs / f"{rollout.name}_server_rank_{self.rank}.log",
            log=say,
            say=say,
        )
        weakref.finalize(self, engine.close)
        if not engine.takes and not self._config.trainer.val_only:
            raise ConfigError(
                "this rollout engine cannot receive new weights, but the policy is trained",
                field="actor_rollout_ref.rollout.name",
                got=rollout.name,
                expected="an engine that can receive weights",
                remedy="set actor_rollout_ref.rollout.name=native, or trainer.val_only=true",
            )
        return engine

    def _split(self, size: int) -> LayerSplit:
        """Create the tensor-parallel process groups of the rollout engine.

        The ranks of a group split the layers among themselves. Their numbers are consecutive.
        """
        place = self.rank % size
        self.register_mesh("rollout", self.rank // size, self.world_size // size, collects=place == 0)
        if size == 1:
            return WHOLE
        groups = [dist.new_group(range(first, first + size)) for first in range(0, self.world_size, size)]
        return LayerSplit(place, size, groups[self.rank // size])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_observed(self) -> Metrics:
        """Return the metrics of `EngineWorker.take_observed`, and the counters of the rollout engine.

        The metric of a counter is named `rollout/COUNTER`.
        """
        observed = super().take_observed()
        counted = self.parts["rollout"].engine.stats() if "rollout" in self.parts else {}
        if counted and not self.meshes()["rollout"].collects:
            return observed  # another rank reports the same counters
        for name, value in counted.items():
            add = observed.add_max if name in _MAX_OVER_RANKS else observed.add_sum
            add(f"rollout/{name}", value)
        return observed

    @property
    def actor(self) -> TrainEngine:
        """The training engine of the policy."""
        return self.trained("actor")
