"""The plan of a run's memory, told as the run begins and held beside what its phases take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from tandem.config.actor import ActorConfig
from tandem.config.critic import CriticConfig
from tandem.config.root import TrainConfig
from tandem.config.trainer import RunConfig
from tandem.device import choose_device
from tandem.errors import ConfigError, DeviceMemoryError, TandemError, WorkerFailure
from tandem.memory.host import host_free
from tandem.memory.levers import levers, with_value
from tandem.memory.plan import Plan, gib, plan
from tandem.memory.shapes import shape_of
from tandem.runtime import WorkerGroup
from tandem.trainer.perf import offered
from tandem.trainer.roles import Roles
from tandem.workers.worst_batch import WorstBatch

_FORWARDS = {"actor": "old log-probs", "ref": "ref log-probs", "critic": "values", "reward_model": "rewards"}
_UPDATES = {"actor": "actor update", "critic": "critic update"}
_TIMED = {
    **{"old log-probs": "old_log_prob", "ref log-probs": "ref", "values": "values", "rewards": "reward"},
    **{"critic update": "update_critic", "actor update": "update_actor"},
}
"""The name in `timing/PHASE` of a phase of the plan in which a worker measures its memory."""


def predicted(made: Plan | None) -> dict[str, float]:
    """Bytes of each phase that workers measure, by its name in `timing/PHASE`; empty without a plan."""
    found: dict[str, float] = {}
    for phase in () if made is None else made.phases:
        timed = _TIMED.get(phase.name.partition(" of ")[0])  # of several models of a kind
        if timed is not None:
            found[timed] = max(found.get(timed, 0.0), phase.allocated)
    return found


def run_worst_batches(config: TrainConfig, roles: Roles) -> None:
    """Has what learns run the largest micro-batches that its updates can come to, where the config asks.

    Raises:
        DeviceMemoryError: the memory of a GPU does not suffice.
    """
    trainer = config.trainer
    if trainer.worst_batch_first is False or trainer.val_only:
        return
    learning: tuple[tuple[WorkerGroup | None, CriticConfig | ActorConfig], ...] = (
        (roles.actor, config.actor_rollout_ref.actor),
        (roles.critic, config.critic),
    )
    for group, section in learning:
        if group is not None:
            offered(group, "run_worst_batch", worst_batch(config, section, group.world_size))


def worst_batch(config: TrainConfig, section: CriticConfig | ActorConfig, ranks: int) -> WorstBatch:
    """The largest micro-batches of a rank's updates: of whole sequences, each as long as prompt and response
    may be together."""
    rollout, fsdp, batching = config.actor_rollout_ref.rollout, section.fsdp_config, section.train_batching
    sequence, length = section.ulysses_sequence_parallel_size, rollout.longest(config.data)
    split = fsdp.tensor_parallel_size * fsdp.pipeline_parallel_size * sequence
    share = -(-section.ppo_mini_batch_size * rollout.n // (ranks // split))
    rows = batching.max_samples or share
    if batching.max_tokens is not None:
        rows = max(1, batching.max_tokens * sequence // length)
    return WorstBatch(min(rows, share), length, rows < share, config.trainer.worst_batch_first is True)


def on_cpu(trainer: RunConfig) -> bool:
    """Whether the workers compute on a CPU, as far as can be known here: under Ray they may be on machines
    that have a device which this one lacks."""
    if trainer.resolved_backend == "local":
        return choose_device(trainer.device).type == "cpu"
    return trainer.device == "cpu"


def tell_plan(config: TrainConfig, say: Callable[[str], None], gpus: bool | None = None) -> Plan | None:
    """Tell the plan of the run's memory: the worst moment and what is left then, or, as a warning, what is
    lacking and what to change first.

    Args:
        gpus: whether the workers have GPUs; None: as the config says.

    Returns:
        the plan; None where there is none, which is told too.
    """
    try:
        made, sentence = _planned(config, on_cpu(config.trainer) if gpus is None else not gpus)
    except Exception as error:  # of a prediction, which must not stop a run
        why = error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
        say(f"There is no plan of this run's memory: {why}.")
        return None
    say(sentence)
    return made


@contextmanager
def memory_explained(config: Any) -> Iterator[None]:
    """The error of a device whose memory did not suffice inside says what it held beside the plan, and what
    to change first.

    Args:
        config: of the run; there is a plan of a `TrainConfig`.
    """
    try:
        yield
    except (DeviceMemoryError, WorkerFailure) as error:
        short = error.__cause__ if isinstance(error, WorkerFailure) else error
        if isinstance(short, DeviceMemoryError) and short.held and isinstance(config, TrainConfig):
            with suppress(TandemError):  # there is no plan, which was said as the run began
                _add_plan(config, short)
                if error is not short:
                    error.message += f"\nmemory: {short.expected}\nremedy: {short.remedy}"
        raise


def _add_plan(config: TrainConfig, short: DeviceMemoryError) -> None:
    """Adds what the plan says of the phase in which memory did not suffice, and what to change first."""
    device = float(short.use["total"])
    config = with_value(config, "trainer.device", "cuda")
    name = (_UPDATES if short.training else _FORWARDS).get(short.role)
    phase = next((each for each in plan(config, shape_of, device).phases if each.name == name), None)
    if phase is None:  # one of several of a kind
        return
    planned = {
        "weights and optimizer": ("weights", "optimizer"),
        "other models": ("others",),
        "the pass": ("gathered", "gradients", "activations", "head"),
        "gaps": ("gaps",),
        "outside PyTorch": ("context", "engine"),
    }
    beyond, cells = {}, []
    for what, parts in planned.items():
        expected = sum(phase.parts.get(part, 0.0) for part in parts)
        beyond[what] = short.held[what] - expected
        cells.append(f"{what} {gib(expected)}, held {gib(short.held[what])}")
    most = max(beyond, key=lambda what: beyond[what])
    said = f"{most} exceeded it most, by {gib(beyond[most])}" if beyond[most] > 0 else "nothing exceeded it"
    short.expected = f"in the {name}, by plan: {'; '.join(cells)}; {said}"
    found = levers(config, lambda changed: plan(changed, shape_of, device), name)
    if found:
        first = f"change first {' '.join(found[0].words)}, which by plan saves {gib(found[0].gain)}"
        short.remedy = f"{first}; or {short.remedy}"


def _planned(config: TrainConfig, cpu: bool) -> tuple[Plan, str]:
    config = with_value(config, "trainer.device", "cpu" if cpu else "cuda")
    if cpu:
        sharing = sum(max(counts) for counts in config.trainer.pools.values())
        device = host_free() / sharing
        whose = " that are free on this host" + (f" for each of {sharing} processes" if sharing > 1 else "")
    else:
        device, whose = _device_here()
    made = plan(config, shape_of, device)
    sentence = f"memory, by plan: at worst {made.at_worst(whose)}"
    if made.fits:
        return made, sentence
    found = levers(config, lambda changed: plan(changed, shape_of, device))
    first = "no single key makes it fit"
    if found:
        first = f"change first {' '.join(found[0].words)}, which saves {gib(found[0].gain)}"
        first += ", and it fits then" if found[0].fits else "; alone that does not suffice"
    return made, f"Warning: {sentence}; {first}. The run goes on, as a plan may be wrong."


def _device_here() -> tuple[float, str]:
    """What a device of this machine has.

    Raises:
        ConfigError: the run's devices are elsewhere.
    """
    if not torch.cuda.is_available():
        raise ConfigError("its devices are on other machines, and what they have is not known here")
    return float(torch.cuda.get_device_properties(0).total_memory), " of a device"
