"""Replay a step of a run.

The replay loads the last checkpoint before the step, reads the samples that the run stored, and runs the
training code. You can also replay the step with another reward, loss or advantage estimator, or without some
samples, to see the difference. The replay does not change the run's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from tandem.algorithms.kl import FULL
from tandem.config.root import TrainConfig
from tandem.device import set_threads
from tandem.errors import ConfigError, DataError
from tandem.lifetime import scratch_folder
from tandem.observability.inside import require_inside
from tandem.observability.reading import Run, listed
from tandem.observability.run import read_batch
from tandem.trainer.takes import (
    NO_CHANGES,
    Changes,
    StepReplay,
    TakenStep,
    in_one_process,
    kept_rows,
    same,
    samples_file,
)

_LEARNT = (
    *("reward/*", "response_length/*", "prompt_length/*", "tokens/*", "advantages/*", "returns/*", "actor/*"),
    *("router/*", "critic/*", "rollout_corr/*", "rollout/log_prob_diff_*", "rollout/prob_*", "rollout/kl"),
    *("rollout/version_lag", "rollout/experts_differ"),
)
"""The metrics that training computes. All other metrics describe generation, time or the machine."""
_CHANGEABLE = (
    *("algorithm.*", "actor_rollout_ref.actor.*", "critic.*", "actor_rollout_ref.ref.*"),
    *("reward_model.overlong_buffer.*", "actor_rollout_ref.rollout.temperature"),
)
_SAMPLED = ("algorithm.filter_groups.*",)
"""Keys in `_CHANGEABLE` that affect how samples are generated. A replay cannot change these keys."""
_PLACES = ("*.model.path", "trainer.device")
"""Keys whose values are paths or devices of this machine."""


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
        step: The number of the step.
        checkpoint: The step of the checkpoint that the replay started from; 0: the initial model of the run.
        recorded: The training metrics that the run wrote.
        replayed: The result of the unchanged step, with the run's processes.
        base: The result of the unchanged step in one process, with its gradients; None if not requested.
        changed: The result of the changed step in one process, with its gradients; None without changes.
        attributed: Whether the gradients of `base` are attributed to tokens.
    """

    step: int
    checkpoint: int
    recorded: dict[str, float]
    replayed: TakenStep
    base: TakenStep | None
    changed: TakenStep | None
    attributed: bool

    @property
    def equal(self) -> bool:
        """Whether all replayed metrics equal the recorded ones, bit for bit."""
        return all(same(value, self.replayed.metrics[name]) for name, value in self.recorded.items())


def replay(run: Run, step: int, changes: Changes = NO_CHANGES, *, attribute: bool = False) -> Replayed:
    """Replay a step.

    Args:
        run: The run. Its folder is not changed.
        step: The number of the step, from 1.
        changes: Changes for a second replay of the step, which is compared with the first one.
        attribute: Whether to attribute the gradient to samples and tokens.

    Raises:
        TandemError: The folder lacks a file that the replay needs (the error names the config key that stores
            it), or a change would affect how samples are generated.
    """
    for part in ("checkpoints", "samples"):
        require_inside(run.path / part, run.path)
    recorded = _row(run, step)
    at, checkpoint = _checkpoint(run, step)
    _require_samples(run, range(at + 1, step + 1))
    if changes.reward is not None and ":" not in changes.reward:
        raise ConfigError(
            "this names no function", field="--reward", got=changes.reward, expected="file.py:function"
        )
    with scratch_folder("replay") as scratch, _threads(recorded):
        step_replay = StepReplay(run, step, scratch)
        places = [word for word in changes.words if _is_one(word, _PLACES)]
        changes = replace(changes, words=[word for word in changes.words if word not in places])
        _require_changeable(changes.words)
        config = step_replay.config(places)
        others = step_replay.config([*places, *changes.words], changes.reward)
        kept_rows(read_batch(samples_file(run, step)), changes.without)  # reject wrong names early
        looks = attribute or bool(changes)
        for watched in (config, others) if looks else ():
            _require_watchable(watched)
        replayed, before = step_replay.take(config, checkpoint, keep=looks)
        base = changed = None
        if looks:
            base, _ = step_replay.take(in_one_process(config), before, watched=True, shares=attribute)
        if changes:
            changed, _ = step_replay.take(in_one_process(others), before, changes, watched=True)
    compared = [n for n in recorded if n in replayed.metrics and _is_one(n, _LEARNT)]
    kept = {name: recorded[name] for name in compared}
    return Replayed(step, at, kept, replayed, base, changed, attribute)


def _row(run: Run, step: int) -> dict[str, float]:
    if "algorithm" not in run.config:
        raise DataError("only runs of reinforcement learning can be replayed", field=str(run.path))
    rows = {row["step"]: row for row in run.metrics if row["step"] > 0}
    if step not in rows:
        raise DataError(
            "the run has no such step",
            field=str(run.path),
            got=step,
            expected=listed(sorted(rows)) or "none yet",
        )
    return {name: value for name, value in rows[step].items() if name != "step"}


def _checkpoint(run: Run, step: int) -> tuple[int, Path | None]:
    """Return the step and folder of the run's last checkpoint before `step`, or of its initial checkpoint."""
    found = {number: path for number, path in run.checkpoints.items() if number < step}
    first = Path(run.setting("trainer.resume_from_path") or "")
    if first.name.startswith("step_"):
        found.setdefault(int(first.name.removeprefix("step_")), first)
    earlier = [number for number in found if number < step]
    return (max(earlier), found[max(earlier)]) if earlier else (0, None)


def _require_samples(run: Run, steps: Sequence[int]) -> None:
    missing = [step for step in steps if not samples_file(run, step).is_file()]
    if missing:
        raise DataError(
            "the run did not keep the samples that this step learned from",
            field=str(run.path / "samples"),
            got=f"no samples of step {listed(missing)}",
            expected=f"samples of every step since the checkpoint of step {steps[0] - 1}",
            remedy="set trainer.samples_freq=1 in the next run to keep them; with trainer.save_freq=1 too, a "
            "replay starts right before its step",
        )


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _is_one(word: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(_key(word), pattern) for pattern in patterns)


def _require_changeable(words: Sequence[str]) -> None:
    for word in words:
        if not _is_one(word, _CHANGEABLE) or _is_one(word, _SAMPLED):
            raise ConfigError(
                "this key does not decide what is learned from given samples",
                field=_key(word),
                got=word,
                expected=f"one of {', '.join(_CHANGEABLE)}",
                remedy="start a new run with this change: it would draw other samples",
            )


def _require_watchable(config: TrainConfig) -> None:
    policy, trainer = config.actor_rollout_ref, config.trainer
    exact = policy.actor.use_kl_loss and policy.actor.kl_loss_type == FULL
    replays = policy.actor.router_replay.mode
    for field, wrong in (
        ("actor_rollout_ref.model.lora_rank", policy.model.lora_rank or None),
        ("actor_rollout_ref.actor.kl_loss_type", FULL if exact else None),
        ("trainer.worker_classes", dict(trainer.worker_classes) or None),
        ("actor_rollout_ref.actor.router_replay.mode", replays if replays != "disabled" else None),
    ):
        if wrong is not None:
            raise ConfigError(
                "gradients cannot be recorded with adapters, an exact KL loss, custom worker classes, or a "
                "replay of experts",
                field=field,
                got=wrong,
                remedy="replay the step without --attribute and without changes",
            )


@contextmanager
def _threads(recorded: Mapping[str, float]) -> Iterator[None]:
    """Set the run's number of CPU threads inside the block, because the last bits of results depend on it."""
    before, asked = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    threads = int(recorded.get("perf/threads/actor", before))
    set_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        set_threads(before)
        del os.environ["OMP_NUM_THREADS"]
        if asked is not None:
            os.environ["OMP_NUM_THREADS"] = asked
