"""Takes of a step: built as its run was, it learns from the samples that the run kept, changed or not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tandem.config.load import load_train_config
from tandem.config.own_code import require_own
from tandem.config.root import TrainConfig
from tandem.config.written import refers, remade
from tandem.errors import ConfigError, DataError
from tandem.observability.config_file import flat
from tandem.observability.metrics import Metrics
from tandem.observability.reading import Run
from tandem.observability.run import read_batch
from tandem.protocol import DataProto, Ragged
from tandem.rewards import own_reward
from tandem.runtime import BatchFuture, Future
from tandem.trainer.assembly import build_ppo
from tandem.trainer.gathering import Gathered
from tandem.trainer.ppo import PPOTrainer
from tandem.trainer.schedule import Learner, Schedule
from tandem.workers.attribution import UpdateGradient
from tandem.workers.correction import KEPT, WEIGHTS

_MADE_ANEW = frozenset(
    {
        *("old_log_probs", "ref_log_probs", "values", "sum_pi_squared", "entropy", "ref_kl", KEPT),
        *(WEIGHTS, "token_level_rewards", "advantages", "returns", "selected_tokens"),
    }
)
"""Columns of a samples file that the step computes."""
_SCORED = frozenset(
    {"scores", "token_level_scores", "reward_extra", "reward_why", "response_text", "reward_failed"}
)
_BASELINES = frozenset({"reward_baselines"})
ENGINES = ("native", "hf")
"""Rollout engines that need no other package."""
_UNREAD = (
    *("custom_reward_function.*", "reward.*", "reward_model.model*", "trainer.*_name", "trainer.logger"),
    *("trainer.default_local_dir", "trainer.cluster.*", "trainer.on_step", "data.*_files", "data.cache_dir"),
    *("data.sampler.*", "*.rollout.server.*"),
)
"""Keys of which a replay needs nothing, so that variables of the environment that they name may be unset."""
_WATCHED = "tandem.workers.attribution"
_NO_REWARD = (
    "def compute_score(*given, **named):\n    raise RuntimeError('a replay takes the recorded scores')\n"
)


@dataclass(frozen=True)
class Changes:
    """What is to be otherwise in a step.

    Attributes:
        words: `key=value`, of keys that decide what is learnt from given samples.
        reward: `file.py:function`, in place of the recorded scores.
        without: samples that are left out, by the uid of their prompt or `uid#sample`.
    """

    words: Sequence[str] = ()
    reward: str | None = None
    without: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.words or self.reward or self.without)


NOTHING = Changes()


@dataclass(frozen=True)
class Taken:
    """A step that was taken.

    Attributes:
        metrics: by name.
        samples: its batch, advantages included.
        gradients: of the actor's updates, where they were looked at.
    """

    metrics: dict[str, float]
    samples: DataProto
    gradients: list[UpdateGradient] = field(default_factory=list)

    @property
    def names(self) -> list[tuple[str, int]]:
        """(B) uid and number of each sample."""
        arrays = self.samples.non_tensor_batch
        return list(zip(arrays["uid"].tolist(), arrays["sample"].tolist(), strict=True))


def same(a: float, b: float) -> bool:
    """Equality to which NaN is equal to NaN."""
    return a == b or (a != a and b != b)


class Recorded(Schedule[Gathered]):
    """Steps that learn from what a run kept.

    Args:
        run: the run.
        step: the one that is changed, if any is.
        changes: in it.
    """

    def __init__(self, run: Run, step: int, changes: Changes) -> None:
        self._run, self._step, self._changes = run, step, changes

    def step(self, step: int, learner: Learner[Gathered]) -> dict[str, float]:
        assert isinstance(learner, Replayer)
        changes = self._changes if step == self._step else NOTHING
        batch = read_batch(samples_file(self._run, step))
        if changes.without:
            batch = batch[kept_rows(batch, changes.without)]
        return learner.learn(step, _gathered(learner, batch, rescore=changes.reward is not None))

    def state_dict(self) -> dict[str, Any]:
        """Nothing is begun before its step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What the run had begun is among its samples."""


class Replayer(PPOTrainer):
    """Takes steps whose samples are there already; see `Recorded`. Keeps the last one's batch."""

    batch: BatchFuture

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"loader": self.prompts.state_dict()})  # no prompts are read

    def _measure(
        self, step: int, batch: BatchFuture, updates: list[tuple[str, Future[Metrics]]]
    ) -> dict[str, float]:
        self.batch = batch
        return super()._measure(step, batch, updates)


def _gathered(trainer: PPOTrainer, batch: DataProto, *, rescore: bool) -> Gathered:
    def part(names: set[str]) -> BatchFuture:
        tensors, arrays = ([n for n in own if n in names] for own in (batch.batch, batch.non_tensor_batch))
        return BatchFuture.of(batch.select(tensors, arrays))

    columns = set(batch.columns) - _MADE_ANEW
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
    """(B) what a reward is given that reads columns by name: what every run keeps of a row, and all of it
    where the run's own reward reads so."""
    arrays = batch.non_tensor_batch
    kept: Iterable[Any] = arrays["columns"] if "columns" in batch else [{}] * len(batch)
    named = ("messages", "data_source", "ground_truth", "extra_info")
    return [
        {
            "prompt": messages[0]["content"] if _is_text(messages) else messages,
            "data_source": source,
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": extra,
            **row,
        }
        for row, messages, source, truth, extra in zip(kept, *(arrays[name] for name in named), strict=True)
    ]


def _is_text(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether they stand for a text without roles."""
    return len(messages) == 1 and not messages[0].get("role")


def prompts_of(batch: DataProto, rows: Sequence[int] | np.ndarray) -> list[torch.Tensor]:
    """The tokens before the first that the policy wrote, of each of these rows."""
    chosen = batch[np.asarray(rows)]
    pairs = zip(chosen.ragged("tokens"), chosen.ragged("response_mask"), strict=True)
    return [ids[: int(mask.int().argmax()) if bool(mask.any()) else len(ids)] for ids, mask in pairs]


def kept_rows(batch: DataProto, without: Sequence[str]) -> np.ndarray:
    """The rows of a batch that are left.

    Args:
        without: see `Changes`.

    Raises:
        ConfigError: one that is not there; nothing is left.
    """
    uids, numbers = batch.non_tensor_batch["uid"], batch.non_tensor_batch["sample"]
    names = [{str(uid), f"{uid}#{number}"} for uid, number in zip(uids, numbers, strict=True)]
    known = set().union(*names)
    for name in without:
        if name not in known:
            raise ConfigError(
                "no such sample in this step",
                field="--without",
                got=name,
                expected=f"a prompt's uid or uid#sample, such as {uids[0]} or {uids[0]}#{numbers[0]}",
            )
    rows = np.flatnonzero([not found & set(without) for found in names])
    if not len(rows):
        raise ConfigError("nothing is left to learn from", field="--without", got=", ".join(without))
    return rows


def _is_unread(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in _UNREAD)


def samples_file(run: Run, step: int) -> Path:
    """Where the samples of a training step are, if they are."""
    return run.path / "samples" / f"step_{step:06d}.parquet"


class Stage:
    """Where takes are made.

    Args:
        run, step: what is replayed.
        scratch: an empty folder.

    Raises:
        ConfigError: the run's config names code, and no run of this user wrote it.
    """

    def __init__(self, run: Run, step: int, scratch: Path) -> None:
        self._run, self._step, self._scratch = run, step, scratch
        self._takes = 0
        starts = [e for e in run.events if e["event"] == "start" and e["step"] < step]
        self._total = starts[-1]["total_steps"] if starts else run.total_steps  # a run may be taken further
        batch = read_batch(samples_file(run, step))
        self._rows, self._reward = scratch / "rows.parquet", scratch / "reward.py"
        # The run's own data need not be here: nothing is read of them.
        prompt = prompts_of(batch, [0])[0].tolist()
        known = _columns(batch[[0]])[0]
        self._columns = set(known)
        row = known | {"prompt": prompt, "data_source": "replay"}
        row |= {"reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": 0}}
        count = max(run.setting("data.train_batch_size"), 1)
        pq.write_table(pa.Table.from_pylist([row] * count), self._rows)
        self._reward.write_text(_NO_REWARD, encoding="utf-8")
        shutil.copy(run.path / "config.yaml", scratch)
        used = self.config(()).model_dump()
        del used["custom_reward_function"]  # ours, in place of the run's
        require_own(run.path / "config.yaml", used)

    def config(self, words: Sequence[str], reward: str | None = None) -> TrainConfig:
        """The run's config with these words, for takes from given samples."""
        path, _, name = (reward or f"{self._reward}:compute_score").rpartition(":")
        rows = [str(self._rows)]
        own: dict[str, Any] = {  # what may not be here, or is told not to be
            "data.train_files": rows,
            "data.val_files": rows if self._run.setting("data.val_files") else None,
            "data.sampler": {"class_path": None, "class_name": None, "kwargs": {}},
            "custom_reward_function": {"path": path, "name": name, "reward_kwargs": {}, "terms": []},
            **{"reward_model.enable": False, "reward.combine": None, "reward.weight": None},
            **{"trainer.resume_mode": "disable", "trainer.resume_from_path": None, "trainer.on_step": None},
        }
        unread = [f"~{key}" for key, value in flat(self._run.config) if refers(value) and _is_unread(key)]
        given = [*unread, *(f"{key}={json.dumps(value)}" for key, value in own.items())]
        config = load_train_config(str(self._scratch / "config.yaml"), [*given, *words]).config
        if reward is not None:
            self._require_columns(config, reward)
        return config

    def _require_columns(self, config: TrainConfig, reward: str) -> None:
        scorer = own_reward(config.custom_reward_function, config.reward.timeout)
        lacks = sorted(set(scorer.reads.needs if scorer else ()) - self._columns)
        if lacks:
            raise DataError(
                "the run kept no such column of the data, and the reward reads it",
                field="--reward",
                got=f"{reward} reads {', '.join(lacks)}",
                expected=f"of {', '.join(sorted(self._columns))}",
                remedy="give the parameter a default; a run keeps all columns where its own reward reads one "
                "by name",
            )

    def take(
        self,
        config: TrainConfig,
        checkpoint: Path | None,
        changes: Changes = NOTHING,
        *,
        watched: str | None = None,
        keep: bool = False,
    ) -> tuple[Taken, Path | None]:
        """The step, and a checkpoint of the one before if it is to be kept.

        Args:
            checkpoint: where to begin; None: with the model that the run began with.
            watched: the class of the actor that looks at gradients, without the word Actor.
        """
        self._takes += 1
        folder = self._scratch / f"take_{self._takes}"
        config = self._placed(config, folder, checkpoint, watched)
        schedule = Recorded(self._run, self._step, changes)
        trainer = build_ppo(config, say=lambda sentence: None, trainer=Replayer, schedule=schedule)
        assert isinstance(trainer, Replayer)
        before = checkpoint
        try:
            with closing(trainer.steps()) as steps:
                for done in steps:
                    if done.number == self._step:
                        break
                    if keep and done.number == self._step - 1 and trainer.steps_taken:
                        before = trainer.save_last()
            gradients = trainer.roles.actor.take_gradients() if watched else []
            return Taken(trainer.done.metrics, trainer.batch.get(), gradients), before
        finally:
            trainer.shutdown()

    def _placed(
        self, config: TrainConfig, folder: Path, checkpoint: Path | None, watched: str | None
    ) -> TrainConfig:
        tree = config.model_dump()
        tree["data"] |= {
            **{"prompt_key": "prompt", "reward_fn_key": "data_source", "gen_batch_size": None},
            **{"shuffle": False, "train_max_samples": -1, "filter_overlong_prompts": False, "val_files": ()},
        }
        tree["algorithm"]["filter_groups"]["enable"] = False  # the samples are those that were left
        if tree["actor_rollout_ref"]["rollout"]["name"] not in ENGINES:  # nothing is generated
            tree["actor_rollout_ref"]["rollout"]["name"] = "hf"
        tree["trainer"] |= {
            **{"default_local_dir": str(folder), "total_training_steps": self._total},
            **{"logger": (), "save_freq": 0, "async_save": False, "max_restarts": 0},
            "samples_freq": sys.maxsize,  # as in the run: what is written is computed; no step is due
            **{"max_ckpt_to_keep": None, "val_before_train": False, "val_only": False, "test_freq": -1},
            **{"keep_best": None, "log_val_generations": 0, "profile": {}},
            "worst_batch_first": False,
            "resume_mode": "disable" if checkpoint is None else "resume_path",
            "resume_from_path": None if checkpoint is None else str(checkpoint),
        }
        if watched:
            tree["trainer"]["worker_classes"] = {"actor_rollout": f"{_WATCHED}:{watched}Actor"}
        return remade(config, tree)


def alone(config: TrainConfig) -> TrainConfig:
    """The same in one process."""
    tree = config.model_dump()
    tree["trainer"] |= {"backend": "local", "nnodes": 1, "n_gpus_per_node": 1}
    tree["trainer"] |= {"resource_pools": {}, "placement": {}}
    policy = tree["actor_rollout_ref"]
    policy["rollout"]["tensor_model_parallel_size"] = 1
    for section in (policy["actor"], policy["ref"], tree["critic"]):
        section["ulysses_sequence_parallel_size"] = 1
        section["fsdp_config"] |= {
            **{"fsdp_size": -1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        }
    return remade(config, tree)
