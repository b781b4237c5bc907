"""The memory plan of a run. It is printed at the start and compared with the memory that phases use."""

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
"""The name in `timing/PHASE` of each phase of the plan in which a worker measures its memory."""


def predicted(made: Plan | None) -> dict[str, float]:
    """Return a dict from phase (as in `timing/PHASE`) to its planned bytes; {} without a plan."""
    found: dict[str, float] = {}
    for phase in () if made is None else made.phases:
        timed = _TIMED.get(phase.name.partition(" of ")[0])  # without the name of one of several models
        if timed is not None:
            found[timed] = max(found.get(timed, 0.0), phase.allocated)
    return found


def run_worst_batches(config: TrainConfig, roles: Roles) -> None:
    """Make the training workers run the largest possible micro-batches, if the config asks for it.

    Args:
        config: The config of the run.
        roles: The worker groups.

    Raises:
        DeviceMemoryError: The memory of a GPU is too small.
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
    """Return the largest micro-batches of a rank's updates.

    They consist of whole sequences, each as long as a prompt and its response may be together.
    """
    rollout, fsdp, batching = config.actor_rollout_ref.rollout, section.fsdp_config, section.train_batching
    sequence, length = section.ulysses_sequence_parallel_size, rollout.longest(config.data)
    split = fsdp.tensor_parallel_size * fsdp.pipeline_parallel_size * sequence
    share = -(-section.ppo_mini_batch_size * rollout.n // (ranks // split))
    rows = batching.max_samples or share
    if batching.max_tokens is not None:
        rows = max(1, batching.max_tokens * sequence // length)
    return WorstBatch(min(rows, share), length, rows < share, config.trainer.worst_batch_first is True)


def on_cpu(trainer: RunConfig) -> bool:
    """Return whether this process expects the workers to compute on a CPU.

    Under Ray, workers may be on machines with a device that this machine does not have.
    """
    if trainer.resolved_backend == "local":
        return choose_device(trainer.device).type == "cpu"
    return trainer.device == "cpu"


def tell_plan(config: TrainConfig, say: Callable[[str], None], gpus: bool | None = None) -> Plan | None:
    """Print the memory plan of the run for the user.

    The message names the phase that needs the most memory and the bytes that are free in this phase. If the
    memory is too small, the message is a warning. It says how many bytes are missing and which key to change
    first.

    Args:
        config: The config of the run.
        say: Prints a sentence for the user.
        gpus: Whether the workers have GPUs; None: the config decides.

    Returns:
        The plan; None if there is no plan. A message then says why.
    """
    try:
        made, sentence = _planned(config, on_cpu(config.trainer) if gpus is None else not gpus)
    except Exception as error:  # an error in a prediction must not stop a run
        why = error.message if isinstance(error, TandemError) else f"{type(error).__name__}: {error}"
        say(f"There is no plan of this run's memory: {why}.")
        return None
    say(sentence)
    return made


@contextmanager
def memory_explained(config: Any) -> Iterator[None]:
    """Add the memory plan to an out-of-memory error of a device that is raised inside the block.

    The error then says how the memory in use compares with the plan, and which key to change first.

    Args:
        config: The config of the run; only a `TrainConfig` has a plan.
    """
    try:
        yield
    except (DeviceMemoryError, WorkerFailure) as error:
        short = error.__cause__ if isinstance(error, WorkerFailure) else error
        if isinstance(short, DeviceMemoryError) and short.held and isinstance(config, TrainConfig):
            with suppress(TandemError):  # there is no plan; a message said so when the run started
                _add_plan(config, short)
                if error is not short:
                    error.message += f"\nmemory: {short.expected}\nremedy: {short.remedy}"
        raise


def _add_plan(config: TrainConfig, short: DeviceMemoryError) -> None:
    """Add the plan of the failed phase to an out-of-memory error, and the key to change first."""
    device = float(short.use["total"])
    config = with_value(config, "trainer.device", "cuda")
    name = (_UPDATES if short.training else _FORWARDS).get(short.role)
    phase = next((each for each in plan(config, shape_of, device).phases if each.name == name), None)
    if phase is None:  # the phase of one of several models of a kind
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
        first = f"change first {' '.join(found[0].words)}, which saves {gib(found[0].gain)} by plan"
        short.remedy = f"{first}; or {short.remedy}"


def _planned(config: TrainConfig, cpu: bool) -> tuple[Plan, str]:
    config = with_value(config, "trainer.device", "cpu" if cpu else "cuda")
    if cpu:
        sharing = sum(max(counts) for counts in config.trainer.pools.values())
        device = host_free() / sharing
        whose = " free on this host" + (f" for each of {sharing} processes" if sharing > 1 else "")
    else:
        device, whose = _device_here()
    made = plan(config, shape_of, device)
    sentence = f"planned memory at the worst moment: {made.at_worst(whose)}"
    if made.fits:
        return made, sentence
    found = levers(config, lambda changed: plan(changed, shape_of, device))
    first = "no single key makes it fit"
    if found:
        first = f"change first {' '.join(found[0].words)}, which saves {gib(found[0].gain)}"
        first += "; then the run fits" if found[0].fits else "; this is not enough"
    return made, f"Warning: {sentence}; {first}. The run continues, because a plan can be wrong."


def _device_here() -> tuple[float, str]:
    """Return the memory of a device of this machine, in bytes, and a description of the device.

    Raises:
        ConfigError: The run's devices are on other machines.
    """
    if not torch.cuda.is_available():
        raise ConfigError("the run's devices are on other machines, and their memory is not known here")
    return float(torch.cuda.get_device_properties(0).total_memory), " on each GPU"
