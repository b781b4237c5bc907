"""The memory plan of a run: an estimate of the memory that each phase of a step needs.

For each phase and each pool of devices, the plan lists the use of a device's memory. It also lists the use of
the host's memory and of the disk. It is computed from the config and the shapes of the models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.config.actor import ActorConfig
from tandem.config.critic import CriticConfig
from tandem.config.root import TrainConfig
from tandem.memory.cache import DeviceMemory, layer_groups
from tandem.memory.roles import Held, Load
from tandem.memory.shapes import ModelShape
from tandem.memory.training import Moment

GIB = 2**30
CONTEXT = 0.6 * GIB
"""Bytes of a CUDA context with the libraries' handles and workspaces; an assumption."""
CHANNELS = 0.4 * GIB
"""Bytes of NCCL's buffers if there is more than one rank; an assumption."""
GAPS = 0.05
"""The fraction of a phase's memory, without weights and optimizer, that fragmentation adds; an assumption."""
_SAMPLE_BYTES = 8 + 1 + 5 * 4 + 4
"""Bytes on the host per token of a batch: id, mask, five fp32 columns and the policy version."""
_PROCESS = 3.0 * GIB
"""Bytes of a worker process on the host with its libraries; not measured on CUDA."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The memory that one phase of a step needs on a device of one pool.

    Attributes:
        name: the name of the phase.
        pool: the name of the pool.
        parts: a dict from purpose to bytes.
        moment: a description of the moment of peak memory in the phase.
        flexible: the bytes that the phase uses but does not need: the KV cache except for one sequence.
    """

    name: str
    pool: str
    parts: dict[str, float]
    moment: str = ""
    flexible: float = 0.0

    @property
    def needed(self) -> float:
        return self.total - self.flexible

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def allocated(self) -> float:
        """Bytes that PyTorch's allocator allocates in a training phase.

        The CUDA context, fragmentation and a rollout engine are not included.
        """
        return sum(size for part, size in self.parts.items() if part not in ("context", "gaps", "engine"))


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory and disk space that a run needs.

    Attributes:
        phases: the phases of a step, in order.
        device: bytes of a device's memory.
        host: a dict from purpose to bytes of a node's host memory.
        disk: bytes of a checkpoint on disk, over all ranks.
        notes: sentences about choices and assumptions.
        slots: number of sequences of maximum length that fit into a rollout engine's KV cache; None: the
            engine has no cache in this process.
        recomputed: the recomputation mode of the actor's update.
    """

    phases: list[Phase]
    device: float
    host: dict[str, float]
    disk: dict[str, float]
    notes: list[str] = field(default_factory=list)
    slots: int | None = None
    recomputed: str = "none"

    @property
    def worst(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.needed)

    @property
    def margin(self) -> float:
        """Bytes that are free at the moment of peak memory; negative if bytes are missing."""
        return self.device - self.worst.needed

    @property
    def fits(self) -> bool:
        return self.margin >= 0

    def at_worst(self, of: str = "") -> str:
        """Return a text about the moment of peak memory: the needed bytes, and the free or missing bytes.

        Args:
            of: text that is inserted after the device's bytes and says whose memory this is.
        """
        worst = self.worst
        at = f", at its {worst.moment}" if worst.moment else ""
        over = f"{gib(self.margin)} free" if self.fits else f"{gib(-self.margin)} missing"
        return f"{worst.name}{at}, {gib(worst.needed)} of {gib(self.device)}{of}: {over}"


def plan(config: TrainConfig, shapes: Callable[[str], ModelShape], device: float) -> Plan:
    """Compute the memory plan of a run.

    Args:
        config: the loaded config.
        shapes: a function that returns the shape of the model at a path.
        device: bytes of a device's memory; for a run on a CPU, bytes of the host's memory.
    """
    return _Planner(config, shapes, device).made()


class _Planner:
    def __init__(self, config: TrainConfig, shapes: Callable[[str], ModelShape], device: float) -> None:
        self.config, self.device = config, device
        self.cuda = config.trainer.device != "cpu"
        self.notes: list[str] = []
        self.slots: int | None = None
        self.recomputed = "none"
        self.held = {held.name: held for held in self._models(shapes)}
        self.pools = {name: config.trainer.placed(name) or "" for name in self.held}
        self.learn: dict[str, CriticConfig | ActorConfig] = {
            "critic": config.critic,
            "actor": config.actor_rollout_ref.actor,
        }
        self.rollout = config.actor_rollout_ref.rollout
        self.share = self.rollout.gpu_memory_utilization or 0.5
        self.longest = self.rollout.longest(config.data)
        self.sampler = self.held.get("rollout", self.held["actor"])
        self.block, self.tables, blocks = self._blocks()
        self.one_sequence = blocks * self.block

    def _blocks(self) -> tuple[float, int, int]:
        """Return the bytes of a block of the KV cache, a sequence's block tables, and its most blocks."""
        rollout, shape = self.rollout, self.sampler.shape
        windows = [window if window < self.longest else 0 for window in shape.windows]
        groups, size = layer_groups(windows), rollout.block_size
        latent = rollout.name in ("vllm", "sglang")
        token = shape.kv_bytes(self.sampler.compute, rollout.split, latent=latent)
        block = size * token * groups.size / len(windows)
        prompt = min(self.config.data.max_prompt_length, rollout.max_num_batched_tokens)
        step = prompt if rollout.enable_chunked_prefill else self.longest
        return block, len(groups.windows), groups.blocks(self.longest, step, size)

    def _models(self, shapes: Callable[[str], ModelShape]) -> Iterator[Held]:
        """Yield the models of all roles. A rollout on other devices than the actor has a frozen copy."""
        config, policy = self.config, self.config.actor_rollout_ref
        devices = config.trainer.devices_of

        def held(
            name: str, section: Any, model: Any, optim: Any = None, path: str | None = None, **more: Any
        ) -> Held:
            shape, fsdp = shapes(path or model.path), section.fsdp_config
            sequence = section.ulysses_sequence_parallel_size
            return Held(name, shape, devices(name), model, fsdp, sequence, optim, self.cuda, **more)

        entropy = policy.actor.entropy_coeff != 0 or policy.actor.adaptive_entropy.enabled
        yield held("actor", policy.actor, policy.model, policy.actor.optim, entropy=entropy)
        if config.trainer.placed("rollout") != config.trainer.placed("actor"):
            yield held("rollout", policy.actor, policy.model.without_adapters)
        if config.needs_reference and not config.reference_is_the_actor:
            for role, reference in policy.ref.references.items():
                yield held(role, policy.ref, policy.model.without_adapters, path=reference.path)
        if config.needs_critic:
            yield held("critic", config.critic, config.critic.model, config.critic.optim, head=False)
        models = config.reward_model
        for role, scorer in models.scorers.items():
            yield held(role, models, models.model, path=scorer.path, head=False)

    def made(self) -> Plan:
        phases = [*self._loads(), *self._rollout(), *self._forwards(), *self._updates()]
        return Plan(phases, self.device, self._host(), self._disk(), self.notes, self.slots, self.recomputed)

    def _beside(self, pool: str, active: str | None = None) -> dict[str, float]:
        """Return a dict from purpose to bytes of all memory on a device except the active model."""
        parts = {"others": 0.0}
        for name, held in self.held.items():
            if self.pools[name] == pool and name != active:
                parts["others"] += sum(held.idle.values())
        if self.cuda:
            several = any(held.ranks > 1 for name, held in self.held.items() if self.pools[name] == pool)
            parts["context"] = CONTEXT + (CHANNELS if several else 0.0)
        return parts

    def _phase(
        self, name: str, held: Held, moment: Moment | None, *, trains: bool = False, **more: float
    ) -> Phase:
        """Return a phase in which a model, and its optimizer if it is trained, is on the device."""
        pool = self.pools[held.name]
        parts = {"weights": held.weights, "optimizer": held.state if trains else held.idle["optimizer"]}
        if name == "rollout" and self.cuda:  # the engine has a separate copy of the weights
            parts["weights"] = held.idle["weights"]
        if moment is not None:
            parts |= {part: size for part, size in moment._asdict().items() if part in _DYNAMIC}
        parts |= {**more, **self._beside(pool, held.name)}
        if self.cuda:
            dynamic = sum(size for part, size in parts.items() if part in _DYNAMIC)
            parts["gaps"] = GAPS * dynamic
        if self.pools.get("rollout", self.pools["actor"]) == pool and name not in ("rollout", "reshard"):
            parts["engine"] = self._left_over()
        return Phase(name, pool, parts, moment.name if moment else "")

    def _loads(self) -> Iterator[Phase]:
        for name, held in self.held.items():
            parts = {"weights": held.weights, "optimizer": held.state, **self._beside(self.pools[name], name)}
            yield Phase(f"load {name}", self.pools[name], parts)

    def _left_over(self) -> float:
        """Return the bytes that the rollout engine keeps outside generation."""
        rollout = self.rollout
        if rollout.free_cache_engine or rollout.on_named_servers or rollout.name == "hf":
            return 0.0
        if rollout.name in ("vllm", "sglang"):
            return self.share * self.device
        weights, cache, _ = self._native()
        return weights + cache

    def _native(self) -> tuple[float, float, float]:
        """Return the bytes of the native engine's weights, of its KV cache, and of the reserve.

        The cache has the size that its sequences need, but at most the size that `DeviceMemory` allows.
        """
        rollout, held = self.rollout, self.sampler
        weights = held.compute * held.shape.parameters / rollout.split
        wanted = self._wanted()
        if not self.cuda:
            return weights, min(wanted, self.share * self.device), 0.0
        others = self._beside(self.pools[held.name], held.name)["others"]
        others += sum(held.idle.values())
        memory = DeviceMemory(int(self.device), int(others + weights), int(weights))
        share = rollout.gpu_memory_utilization or (0.9 if rollout.free_cache_engine else 0.5)
        cache = min(wanted, memory.cache(share))
        sequences = self.slots = int(cache // self.one_sequence)
        if sequences == 0:
            self.notes.append("the KV cache cannot hold one sequence of the greatest length")
        elif cache < wanted:
            what = "sequence" if sequences == 1 else "sequences"
            self.notes.append(f"the KV cache holds {sequences} {what} of {self.longest} tokens at a time")
        return weights, max(cache, self.one_sequence), float(memory.reserved)

    def _wanted(self) -> float:
        """Return the bytes of a cache for the maximum number of running sequences of maximum length."""
        rollout = self.rollout
        if rollout.num_gpu_blocks_override is not None:
            return rollout.num_gpu_blocks_override * self.tables * self.block
        engines = max(1, self.sampler.ranks // rollout.split)
        samples = -(-self.config.data.prompts_at_a_time * rollout.n // engines)
        return min(rollout.max_num_seqs, samples) * self.one_sequence

    def _rollout(self) -> Iterator[Phase]:
        rollout, held = self.rollout, self.sampler
        if rollout.on_named_servers:
            self.notes.append("responses come from other servers, whose memory is not part of this plan")
            return
        if rollout.name in ("vllm", "sglang"):
            engine = self.share * self.device
            weights = held.compute * held.shape.parameters / rollout.split
            self.slots = int((engine - weights) // self.one_sequence)
            bucket = rollout.update_weights_bucket_megabytes * 2.0**20
            yield self._phase("reshard", held, None, engine=engine, gathered=bucket)
            yield self._phase("rollout", held, None, engine=engine)
            return
        weights, cache, reserve = self._native()
        divided = held.split > 1 or held.fsdp.expert_parallel_size > 1
        streamed = held.model.lora_rank > 0 or divided  # tensor by tensor, not all at once
        whole = held.compute * (held.shape.largest if streamed else held.gathered.whole)
        if self.cuda and rollout.name == "native":
            yield self._phase("reshard", held, None, gathered=whole, engine=weights)
            reserve = max(0.0, reserve - self._beside(self.pools[held.name])["context"])
            phase = self._phase("rollout", held, None, engine=weights, cache=cache, reserve=reserve)
            yield replace(phase, flexible=cache - self.one_sequence)
        else:
            yield self._phase("rollout", held, None, gathered=whole, cache=cache)

    def _training_load(self, section: CriticConfig | ActorConfig) -> Load:
        """Return the samples of a trained model's mini-batch, as a `Load`."""
        samples = section.ppo_mini_batch_size * self.rollout.n
        return Load(samples, self.longest, section.train_batching)

    def _forwards(self) -> Iterator[Phase]:
        config, policy = self.config, self.config.actor_rollout_ref
        samples = config.data.train_batch_size * self.rollout.n
        every = {
            "actor": ("old log-probs", policy.rollout.log_prob_batching),
            "ref": ("ref log-probs", policy.ref.log_prob_batching),
            "critic": ("values", config.critic.forward_batching),
            "reward_model": ("rewards", config.reward_model.forward_batching),
        }
        for role, (phase, batching) in every.items():
            for name, held in self.held.items():
                kind, _, one = name.partition(".")
                if kind == role:
                    # The sample files contain entropies.
                    entropy = role == "actor" and config.trainer.samples_freq > 0
                    moment = held.forward(Load(samples, self.longest, batching), entropy=entropy)
                    yield self._phase(f"{phase} of {one}" if one else phase, held, moment)

    def _updates(self) -> Iterator[Phase]:
        for name, section in self.learn.items():
            held, phase = self.held.get(name), f"{name} update"
            if held is None:
                continue
            load = self._training_load(section)
            free = self.device - self._phase(phase, held, None, trains=True).total
            moment, again = held.update(load, free, self.device)
            tokens, count = held.tokens(load)
            reduced = "in each" if held.reduces_each(self.device) else "in the last"
            self.notes.append(
                f"{phase}: {count} micro-batch{'es' if count > 1 else ''} of {tokens:,} tokens per device "
                f"at most; recomputation: {again}"
                + (f"; gradients reduced {reduced}" if count > 1 < held.shards else "")
            )
            self.recomputed = again  # the actor is the last role, so this is the actor's value
            yield self._phase(phase, held, moment, trains=True)
        yield self._phase("save", self.held["actor"], None, trains=False)

    def _host(self) -> dict[str, float]:
        """Return a dict from purpose to bytes of host memory, for the node with the most processes."""
        config, trainer = self.config, self.config.trainer
        processes = {name: max(counts) for name, counts in trainer.pools.items()}
        parts = {"offloaded": 0.0, "activations": 0.0, "checkpoints": 0.0, "processes": 0.0}
        for name, held in self.held.items():
            here = processes[self.pools[name]]
            parts["offloaded"] += here * held.offloaded
            if trainer.async_save and held.optim is not None:
                parts["checkpoints"] += here * (held.weights + held.state + held.host_state)
            if held.way().setup.offloaded and held.optim is not None:
                tokens, _ = held.tokens(self._training_load(self.learn[name]))
                # the inputs of all layers except the layers on the device; the other activations are
                # recomputed
                inputs = tokens * held.shape.decoder.hidden * held.compute * held.gathered.layers
                parts["activations"] = max(parts["activations"], float(here * inputs))
        parts["processes"] = max(processes.values()) * _PROCESS
        parts["samples"] = config.data.train_batch_size * self.rollout.n * self.longest * float(_SAMPLE_BYTES)
        return parts

    def _disk(self) -> dict[str, float]:
        """Return the bytes of a checkpoint: the weights and the optimizer state of each trained model."""
        parts = {}
        for name, held in self.held.items():
            if held.optim is not None:
                own = held.gathered
                state = (held.state + held.host_state) * held.shards
                parts[name] = (held.master * own.learned + state) * held.split
        return {"checkpoint": sum(parts.values())}


def gib(size: float) -> str:
    """Return a number of bytes as text, in GiB or MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


_DYNAMIC = ("gathered", "gradients", "activations", "head")
