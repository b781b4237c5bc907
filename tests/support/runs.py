"""Complete runs of the real trainer on a tiny model, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config.load import load_train_config
from tandem.observability.run import read_metrics, read_samples
from tandem.trainer.assembly import build_ppo
from tandem.trainer.loop import Schedule
from tandem.trainer.ppo import PPOTrainer
from tests.support.tiny import make_model, write_problems


@dataclass
class Finished:
    """A run that ended.

    Attributes:
        trainer: The controller. Its workers are shut down, but on the local backend they can still be read.
        folder: The run folder.
        said: The messages that the run printed.
    """

    trainer: PPOTrainer
    folder: Path
    said: list[str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    def samples(self, step: int) -> dict[str, list[Any]]:
        return read_samples(self.folder / "samples" / f"step_{step:06d}.parquet")

    def weights(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.actor.actor.weights()}

    @property
    def actor(self) -> Any:
        """The actor's worker, which the local backend keeps in this process."""
        return self.trainer.roles.actor._workers._worker


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return only the metrics that do not depend on the machine."""
    timed = ("timing", "perf", "controller")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]


def same_weights(a: Finished, b: Finished) -> bool:
    first, second = a.weights(), b.weights()
    return all(torch.equal(first[name], second[name]) for name in first)


@contextmanager
def broken_off(step: int) -> Iterator[None]:
    """End the run inside the block with an error in the middle of `step`; nothing of this step is kept."""

    class Stop(Exception):
        """An error that stands for anything that ends a process."""

    original = PPOTrainer.step

    def breaks(self: PPOTrainer, number: int, prompts: Any) -> dict[str, float]:
        metrics = original(self, number, prompts)
        if number == step:
            raise Stop
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOTrainer, "step", breaks)
        with pytest.raises(Stop):
            yield


class Lab:
    """A maker of runs that share one model and one pair of data files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model(folder / "model")
        self.train, self.val = write_problems(folder)

    def overrides(self, run: Path, **changes: Any) -> list[str]:
        keys = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": self.train,
            "data.train_batch_size": 4,
            "data.max_prompt_length": 8,
            "data.max_response_length": 6,
            "actor_rollout_ref.model.path": self.model,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "actor_rollout_ref.actor.optim.lr": 0.01,
            "actor_rollout_ref.rollout.n": 3,
            "trainer.total_training_steps": 2,
            "trainer.default_local_dir": run,
            "trainer.save_freq": 0,
            "trainer.samples_freq": 1,
            "trainer.logger": "[]",
        }
        keys |= {name.replace("__", "."): value for name, value in changes.items()}
        return [f"{name}={'null' if value is None else value}" for name, value in keys.items()]

    def trainer(
        self,
        run: Path,
        *words: str,
        said: list[str] | None = None,
        trainer: type[PPOTrainer] = PPOTrainer,
        schedule: Schedule[Any] | None = None,
    ) -> PPOTrainer:
        loaded = load_train_config(None, [*self.overrides(run), *words])
        said = [] if said is None else said
        said.extend(loaded.notices)
        return build_ppo(loaded.config, say=said.append, trainer=trainer, schedule=schedule)

    def run(
        self,
        name: str,
        *words: str,
        trainer: type[PPOTrainer] = PPOTrainer,
        schedule: Schedule[Any] | None = None,
    ) -> Finished:
        """Run in the folder `name`, with `key=value` words in addition to the usual ones.

        Args:
            name: The name of the run folder.
            words: Words of the config.
            trainer: The class of the trainer.
            schedule: The order of the steps.
        """
        said: list[str] = []
        made = self.trainer(self.folder / name, *words, said=said, trainer=trainer, schedule=schedule)
        try:
            made.fit()
        finally:
            made.shutdown()
        return Finished(made, self.folder / name, said)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))
