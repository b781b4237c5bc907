"""Repeat a step of a run from the samples that the run stored, with or without changes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.config.load import load_train_config
from tandem.config.own_code import require_own
from tandem.config.root import TrainConfig
from tandem.config.trainer import ProfileConfig
from tandem.config.written import refers
from tandem.data.loader import BatchLoader, Prefix
from tandem.data.mixture import EpochOrder
from tandem.errors import ConfigError, DataError
from tandem.memory.levers import with_values
from tandem.models.routing import ROUTED
from tandem.observability.config_file import flat
from tandem.observability.reading import Run
from tandem.observability.run import read_batch
from tandem.protocol import DataProto, Ragged
from tandem.rewards import own_reward
from tandem.runtime import BatchFuture
from tandem.trainer.assembly import build_ppo
from tandem.trainer.gathering import Gathered
from tandem.trainer.loop import Loop, Schedule
from tandem.trainer.ppo import PPOTrainer, Updates
from tandem.trainer.quiet import quiet
from tandem.workers.attribution import UpdateGradient
from tandem.workers.correction import KEPT, WEIGHTS
from tandem.workers.data import Read

_RECOMPUTED = frozenset(
    {
        *("old_log_probs", "ref_log_probs", "values", "sum_pi_squared", "entropy", "ref_kl", KEPT),
        *(WEIGHTS, "token_level_rewards", "advantages", "returns", "selected_tokens"),
    }
)
"""Columns of a samples file that the repeated step recomputes."""
_SCORED = frozenset(
    {"scores", "token_level_scores", "reward_extra", "reward_why", "response_text", "reward_failed"}
)
_BASELINES = frozenset({"reward_baselines"})
ENGINES = ("native", "hf")
"""Rollout engines that need no additional package."""
_UNUSED_KEYS = (
    *("custom_reward_function.*", "reward.*", "reward_model.model*", "trainer.*_name", "trainer.logger"),
    *("trainer.default_local_dir", "trainer.cluster.*", "trainer.on_step", "data.*_files", "data.cache_dir"),
    *("data.sampler.*", "*.rollout.server.*"),
)
"""Keys that a replay does not use, so environment variables in their values need not be set."""
_WATCHED = "tandem.workers.attribution:WatchedActor"


@dataclass(frozen=True)
class Changes:
    """Changes to make in a replayed step.

    Attributes:
        words: `key=value` changes of keys that only affect training, not how samples are generated.
        reward: `file.py:function`, to use instead of the recorded scores.
        without: Samples to leave out, as the uid of a prompt or `uid#sample`.
    """

    words: Sequence[str] = ()
    reward: str | None = None
    without: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.words or self.reward or self.without)


NO_CHANGES = Changes()


@dataclass(frozen=True)
class TakenStep:
    """The result of a repeated step.

    Attributes:
        metrics: A dict from name to value.
        samples: The batch of the step, including advantages.
        gradients: The gradients of the actor's updates, if they were recorded.
    """

    metrics: dict[str, float]
    samples: DataProto
    gradients: list[UpdateGradient] = field(default_factory=list)

    @property
    def names(self) -> list[tuple[str, int]]:
        """(B) The uid and the sample number of each sample."""
        arrays = self.samples.non_tensor_batch
        return list(zip(arrays["uid"].tolist(), arrays["sample"].tolist(), strict=True))


def same(a: float, b: float) -> bool:
    """Return whether two numbers are equal, with NaN equal to NaN."""
    return a == b or (a != a and b != b)


class RecordedSchedule(Schedule[Gathered]):
    """A schedule whose steps learn from the samples that a run stored.

    Args:
        run: The run.
        step: The step to change, if there are changes.
        changes: The changes.
    """

    def __init__(self, run: Run, step: int, changes: Changes) -> None:
        self._run, self._step, self._changes = run, step, changes

    def step(self, step: int, loop: Loop[Gathered]) -> dict[str, float]:
        assert isinstance(loop, ReplayTrainer)
        changes = self._changes if step == self._step else NO_CHANGES
        batch = read_batch(samples_file(self._run, step))
        if changes.without:
            batch = batch[kept_rows(batch, changes.without)]
        return loop.learn(step, _gathered(loop, batch, rescore=changes.reward is not None))


class NoContent:
    """The dataset of a replay. It has rows but no content, because a replay reads no data.

    Args:
        rows: The number of rows.
    """

    def __init__(self, rows: int) -> None:
        self.digests: np.ndarray = np.zeros(rows, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self.digests)

    def batch(self, rows: Sequence[int], *, uid_prefix: Prefix) -> DataProto:
        raise AssertionError("a replay uses the recorded samples")


def _no_data(count: int) -> Read:
    """Return the data of a replay's data worker.

    It is created in the worker, because a loader cannot be sent to another process.
    """
    rows = NoContent(count)
    return Read(rows, BatchLoader(rows, count, EpochOrder(shuffle=False, seed=0)), None)


class ReplayTrainer(PPOTrainer):
    """A trainer that takes steps of a `RecordedSchedule`, and keeps the batch of the last step."""

    batch: BatchFuture

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"loader": self.prompts.state_dict()})  # no prompts are read

    def _measure(self, step: int, batch: BatchFuture, updates: Updates) -> dict[str, float]:
        self.batch = batch
        return super()._measure(step, batch, updates)


def _gathered(trainer: PPOTrainer, batch: DataProto, *, rescore: bool) -> Gathered:
    def part(names: set[str]) -> BatchFuture:
        tensors, arrays = ([n for n in own if n in names] for own in (batch.batch, batch.non_tensor_batch))
        return BatchFuture.of(batch.select(tensors, arrays))

    columns = set(batch.columns) - _RECOMPUTED
    if trainer.config.actor_rollout_ref.actor.router_replay.mode != "R3":  # else the rollout recorded it
        columns.discard(ROUTED)
    samples = part(columns - _SCORED - _BASELINES - ({"columns"} if rescore else set()))
    scores = part(columns & _SCORED)
    if rescore:
        samples = samples.union(BatchFuture.of(DataProto({}, {"columns": _columns(batch)})))
        scores = trainer.gatherer.shaped(trainer.roles, samples, trainer.roles.score(samples))
    uids = batch.non_tensor_batch["uid"]
    first = np.sort(np.unique(uids, return_index=True)[1])
    ids = Ragged.from_list([ids.tolist() for ids in prompts_of(batch, first)], dtype=torch.int64)
    prompts = BatchFuture.of(DataProto({"prompts": ids}, {"uid": uids[first]}))
    baselines = columns & _BASELINES
    return Gathered(prompts, samples, scores, {}, (part(baselines),) if baselines else ())


def _columns(batch: DataProto) -> list[dict[str, Any]]:
    """Return the columns for a reward that reads columns by name: a list of B dicts, one per row.

    Every run stores the basic columns. If the run's reward reads columns by name, the run stores all columns.
    """
    arrays = batch.non_tensor_batch
    kept: Iterable[Any] = arrays["columns"] if "columns" in batch else [{}] * len(batch)
    named = ("messages", "data_source", "ground_truth", "extra_info")
    return [
        {
            "prompt": messages if len(messages) != 1 or messages[0].get("role") else messages[0]["content"],
            "data_source": source,
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": extra,
            **row,
        }
        for row, messages, source, truth, extra in zip(kept, *(arrays[name] for name in named), strict=True)
    ]


def prompts_of(batch: DataProto, rows: Sequence[int] | np.ndarray) -> list[torch.Tensor]:
    """Return the prompt of each row: all tokens before the first token that the policy generated."""
    chosen = batch[np.asarray(rows)]
    pairs = zip(chosen.ragged("tokens"), chosen.ragged("response_mask"), strict=True)
    return [ids[: int(mask.int().argmax()) if bool(mask.any()) else len(ids)] for ids, mask in pairs]


def kept_rows(batch: DataProto, without: Sequence[str]) -> np.ndarray:
    """Return the row numbers of a batch that remain after samples are left out.

    Args:
        batch: The batch.
        without: The samples to leave out; see `Changes`.

    Raises:
        ConfigError: A sample in `without` does not exist, or no row remains.
    """
    uids, numbers = batch.non_tensor_batch["uid"], batch.non_tensor_batch["sample"]
    names = [{str(uid), f"{uid}#{number}"} for uid, number in zip(uids, numbers, strict=True)]
    known = set().union(*names)
    for name in without:
        if name not in known:
            raise ConfigError(
                "this step has no such sample",
                field="--without",
                got=name,
                expected=f"a prompt's uid or uid#sample, such as {uids[0]} or {uids[0]}#{numbers[0]}",
            )
    rows = np.flatnonzero([not found & set(without) for found in names])
    if not len(rows):
        raise ConfigError("no samples are left to learn from", field="--without", got=", ".join(without))
    return rows


def samples_file(run: Run, step: int) -> Path:
    """Return the path of the samples file of a training step, which may not exist."""
    return run.path / "samples" / f"step_{step:06d}.parquet"


class StepReplay:
    """Repeats a step of a run, in a scratch folder.

    Args:
        run: The run.
        step: The step to replay.
        scratch: An empty folder.

    Raises:
        ConfigError: The run's config loads code, but another user wrote the run folder.
    """

    def __init__(self, run: Run, step: int, scratch: Path) -> None:
        self._run, self._step, self._scratch = run, step, scratch
        self._takes = 0
        starts = [e for e in run.events if e["event"] == "start" and e["step"] < step]
        self._total = starts[-1]["total_steps"] if starts else run.total_steps  # a resumed run may be longer
        self._samples = samples_file(run, step)
        self._columns = set(_columns(read_batch(self._samples)[[0]])[0])
        shutil.copy(run.path / "config.yaml", scratch)
        require_own(run.path / "config.yaml", self.config(()).model_dump())

    def config(self, words: Sequence[str], reward: str | None = None) -> TrainConfig:
        """Return the run's config with changes, for steps that learn from stored samples."""
        samples = [str(self._samples)]
        own: dict[str, Any] = {  # what may be missing here or must not run
            "data.train_files": samples,
            "data.val_files": samples if self._run.setting("data.val_files") else None,
            "data.sampler": {"class_path": None, "class_name": None, "kwargs": {}},
            **{"reward_model.enable": False, "reward.combine": None, "reward.weight": None},
            **{"trainer.resume_mode": "disable", "trainer.resume_from_path": None, "trainer.on_step": None},
        }
        unread = [
            f"~{key}"
            for key, value in flat(self._run.config)
            if refers(value) and any(fnmatchcase(key, pattern) for pattern in _UNUSED_KEYS)
        ]
        if reward is not None:
            path, _, name = reward.rpartition(":")
            own["custom_reward_function"] = {"path": path, "name": name, "reward_kwargs": {}, "terms": []}
        given = [*unread, "~custom_reward_function"]
        given += [f"{key}={json.dumps(value)}" for key, value in own.items()]
        config = load_train_config(str(self._scratch / "config.yaml"), [*given, *words]).config
        if reward is not None:
            scorer = own_reward(config.custom_reward_function, config.reward.timeout)
            lacks = sorted(set(scorer.reads.needs if scorer else ()) - self._columns)
            if lacks:
                raise DataError(
                    "the reward reads a column of the data that the run did not keep",
                    field="--reward",
                    got=f"{reward} reads {', '.join(lacks)}",
                    expected=f"of {', '.join(sorted(self._columns))}",
                    remedy="give the parameter a default; a run keeps all columns if its own reward reads a "
                    "column by name",
                )
        return config

    def take(
        self,
        config: TrainConfig,
        checkpoint: Path | None,
        changes: Changes = NO_CHANGES,
        *,
        watched: bool = False,
        shares: bool = False,
        keep: bool = False,
    ) -> tuple[TakenStep, Path | None]:
        """Take the step, and return its result and the checkpoint that the step started from.

        Args:
            config: A result of `config`.
            checkpoint: The checkpoint to start from; None: the initial model of the run.
            changes: The changes to make in the step.
            watched: Whether to record the gradients of the actor's updates.
            shares: Whether to attribute these gradients to tokens as well.
            keep: Whether to save a checkpoint right before the step. This checkpoint is then returned.
        """
        self._takes += 1
        values: dict[str, Any] = {
            "data.gen_batch_size": None,
            "data.val_files": (),
            "algorithm.filter_groups.enable": False,  # the samples were filtered in the run
            "trainer.samples_freq": sys.maxsize,  # computes the columns of a samples file, but writes none
            "trainer.max_ckpt_to_keep": None,
            "trainer.profile": ProfileConfig(),
            "trainer.worst_batch_first": False,
        }
        if config.actor_rollout_ref.rollout.name not in ENGINES:  # nothing is generated
            values["actor_rollout_ref.rollout.name"] = "hf"
        if checkpoint is not None:
            values |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(checkpoint)}
        if watched:
            values["trainer.worker_classes"] = {"actor_rollout": _WATCHED}
        trainer = build_ppo(
            quiet(config, self._scratch / f"take_{self._takes}", self._total, values),
            say=lambda sentence: None,
            trainer=ReplayTrainer,
            schedule=RecordedSchedule(self._run, self._step, changes),
            data=partial(_no_data, max(config.data.train_batch_size, 1)),
        )
        assert isinstance(trainer, ReplayTrainer)
        before = checkpoint
        try:
            if shares:
                trainer.roles.actor.take_apart()
            with closing(trainer.steps()) as steps:
                for done in steps:
                    if done.number == self._step:
                        break
                    if keep and done.number == self._step - 1 and trainer.steps_taken:
                        before = trainer.save_last()
            gradients = trainer.roles.actor.take_gradients() if watched else []
            return TakenStep(trainer.done.metrics, trainer.batch.get(), gradients), before
        finally:
            trainer.shutdown()


def in_one_process(config: TrainConfig) -> TrainConfig:
    """Return a copy of the config with all roles in one process."""
    whole = {
        **{"trainer.backend": "local", "trainer.nnodes": 1, "trainer.n_gpus_per_node": 1},
        **{"trainer.resource_pools": {}, "trainer.placement": {}},
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    }
    for at in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        whole[f"{at}.ulysses_sequence_parallel_size"] = 1
        whole |= {f"{at}.fsdp_config.{kind}_parallel_size": 1 for kind in ("tensor", "pipeline")}
        whole[f"{at}.fsdp_config.fsdp_size"] = -1
    found: TrainConfig = with_values(config, whole)
    return found
