"""Complete runs of the real trainer on a tiny model, in this process."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.observability.run import read_metrics, read_samples
from tandem.trainer.assembly import build_ppo
from tandem.trainer.ppo import PPOTrainer
from tests.support.tiny import make_model, write_problems
from tests.support.words import words as full_words

REWARD_HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"


@dataclass
class Finished:
    """A run that ended; on the local backend its workers can still be read."""

    trainer: PPOTrainer
    folder: Path
    said: list[str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    def samples(self, step: int) -> dict[str, list[Any]]:
        return read_samples(self.folder / "samples" / f"step_{step:06d}.parquet")

    def each(self, step: int, *names: str) -> list[tuple[Any, ...]]:
        """Return these columns of each sample of a step."""
        samples = self.samples(step)
        return list(zip(*(samples[name] for name in names), strict=True))

    def tokens(self, step: int) -> list[dict[str, Any]]:
        """Return each response token of a step with its columns and those of its sample, `sample`."""
        samples = self.samples(step)
        found = []
        for number, mask in enumerate(samples["response_mask"]):
            own = {name: column[number] for name, column in samples.items()} | {"sample": number}
            lists = [name for name, value in own.items() if isinstance(value, list)]
            for place in np.flatnonzero(mask):
                found.append(own | {name: own[name][place] for name in lists if len(own[name]) == len(mask)})
        return found

    @property
    def log(self) -> str:
        return (self.folder / "log" / "run.log").read_text()

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    def weights(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.actor.actor.weights()}

    @property
    def actor(self) -> Any:
        return self.trainer.roles.actor._workers._worker


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("timing", "perf", "controller")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]


def same_weights(a: Finished, b: Finished) -> bool:
    first, second = a.weights(), b.weights()
    return all(torch.equal(first[name], second[name]) for name in first)


def assert_same(a: Finished, b: Finished) -> None:
    assert same_weights(a, b)
    assert without_times(a.rows) == without_times(b.rows)


@contextmanager
def at_step(
    number: int, does: Callable[[Any], object], *, after: bool = False, trainer: type[Any] = PPOTrainer
) -> Iterator[None]:
    """Call `does` with the trainer before, or after, the step of this number of runs inside the block."""
    original = trainer.step

    def step(self: Any, count: int, prompts: Any) -> dict[str, float]:
        if count == number and not after:
            does(self)
        metrics = original(self, count, prompts)
        if count == number and after:
            does(self)
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "step", step)
        yield


def interrupt(_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def broken_off(step: int) -> Iterator[None]:
    """End the run inside the block with an error in the middle of `step`; nothing of this step is kept."""

    class Stop(Exception): ...

    def stop(_: object) -> None:
        raise Stop

    with at_step(step, stop, after=True), pytest.raises(Stop):
        yield


class Lab:
    """A maker of runs that share one model and one pair of data files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model(folder / "model")
        self.train, self.val = write_problems(folder)

    def overrides(self, run: Path, **changes: Any) -> list[str]:
        usual = full_words(
            f"algorithm.adv_estimator=grpo data.train_files={self.train} data.train_batch_size=4",
            f"data.max_prompt_length=8 data.max_response_length=6 M.path={self.model}",
            "A.ppo_mini_batch_size=4 A.optim.lr=0.01 R.n=3 steps=2",
            "trainer.save_freq=0 trainer.samples_freq=1 trainer.logger=[]",
        )
        keys = dict(word.split("=", 1) for word in usual) | {"trainer.default_local_dir": str(run)}
        keys |= {name.replace("__", "."): value for name, value in changes.items()}
        return [f"{name}={'null' if value is None else value}" for name, value in keys.items()]

    def config(self, *words: str, run: str = "never") -> TrainConfig:
        """Return the config of a run that is not made."""
        return load_train_config(None, [*self.overrides(self.folder / run), *full_words(*words)]).config

    def reward(self, source: str, name: str = "compute_score") -> str:
        """Return the words for a reward function of this source, or of this expression of a `response`."""
        file = self.folder / f"reward_{crc32(source.encode()):x}.py"
        if "\n" not in source:
            source = f"{REWARD_HEAD}\n    response = solution_str\n    return {source}\n"
        file.write_text(source)
        words = f"custom_reward_function.path={file}"
        return words if name == "compute_score" else f"{words} custom_reward_function.name={name}"

    def worker(self, methods: str) -> str:
        file = self.folder / f"worker_{crc32(methods.encode()):x}.py"
        lines = [f"    @register()\n    def {method}(self, *_): ...\n" for method in methods.split()]
        file.write_text("from tandem.runtime import Worker, register\nclass Own(Worker):\n" + "".join(lines))
        return f"{file}:Own"

    @property
    def letters(self) -> str:
        return self.reward("len(set(response)) / 6")

    @property
    def validated(self) -> str:
        return f"data.val_files={self.val}"

    def resumed(self, name: str, *words: str, at: int) -> Finished:
        """End a run in the middle of step `at`, and return the run that the same words resume."""
        with broken_off(at):
            self.run(name, *words)
        return self.run(name, *words)

    def trainer(self, run: Path, *words: str, said: list[str] | None = None, **options: Any) -> PPOTrainer:
        loaded = load_train_config(None, [*self.overrides(run), *full_words(*words)])
        said = [] if said is None else said
        said.extend(loaded.notices)
        return build_ppo(loaded.config, say=said.append, **options)

    def run(self, name: str, *words: str, **options: Any) -> Finished:
        """Run in the folder `name` with short words of the config (`words.py`) and options of `build_ppo`."""
        said: list[str] = []
        made = self.trainer(self.folder / name, *words, said=said, **options)
        try:
            made.fit()
        finally:
            made.shutdown()
        return Finished(made, self.folder / name, said)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))
