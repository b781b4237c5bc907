"""Complete supervised runs, `tandem sft` and `tandem rm`, on a tiny model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.config.load import Loaded, load_rm_config, load_sft_config
from tandem.observability.run import read_metrics
from tandem.trainer.assembly import build_supervised
from tandem.trainer.supervised import SupervisedTrainer
from tests.support.tiny import make_model, write_rows
from tests.support.words import words as full_words

FP64 = "fsdp_config.model_dtype=fp64"
LOADERS: dict[str, Callable[..., Loaded[Any]]] = {"sft": load_sft_config, "rm": load_rm_config}


def text(draw: np.random.Generator, low: int, high: int, letters: str = "abcdefgh") -> str:
    return "".join(draw.choice(list(letters), size=draw.integers(low, high + 1)))


def preferences(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return pairs of unequal length, from which nothing can be learned."""
    draw = np.random.default_rng(seed)
    lengths = {"prompt": (2, 9), "chosen": (1, 14), "rejected": (1, 14)}
    return [
        {name: text(draw, *span) for name, span in lengths.items()} | {"margin": float(draw.random())}
        for _ in range(count)
    ]


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    roles = ("user", "assistant", "user", "assistant")
    talks = [[{"role": role, "content": text(draw, 1, 9)} for role in roles] for _ in range(count)]
    return [{"messages": messages} for messages in talks]


@dataclass
class Taught:
    """A run that ended; on the local backend its workers can still be read."""

    trainer: SupervisedTrainer
    folder: Path
    said: list[str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def engine(self) -> Any:
        return self.trainer.model._workers._worker.engine  # type: ignore[attr-defined]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.engine.weights()}


class School:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model(folder / "model")
        self.files = {
            task: (
                write_rows(folder / f"{task}.parquet", made(23)),
                write_rows(folder / f"{task}_held_out.parquet", made(7, seed=1)),
            )
            for task, made in (("rm", preferences), ("sft", conversations))
        }

    def words(self, task: str, name: str, *words: str) -> list[str]:
        """Return a command line for six steps over three epochs, in the run folder `name`."""
        train, held_out = self.files[task]
        return full_words(
            f"model.path={self.model} data.train_files={train} data.val_files={held_out}",
            "data.train_batch_size=9 data.max_length=48 optim.lr=0.01 optim.lr_scheduler_type=cosine",
            "trainer.total_epochs=3 trainer.test_freq=2 trainer.logger=[]",
            f"trainer.default_local_dir={self.folder / name}",
            *words,
        )

    def build(self, task: str, name: str, *words: str, said: list[str] | None = None) -> SupervisedTrainer:
        say = (said if said is not None else []).append
        return build_supervised(LOADERS[task](None, self.words(task, name, *words)).config, say=say)

    def run(self, task: str, name: str, *words: str) -> Taught:
        said: list[str] = []
        trainer = self.build(task, name, *words, said=said)
        try:
            trainer.fit()
        finally:
            trainer.shutdown()
        return Taught(trainer, self.folder / name, said)


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    return School(tmp_path_factory.mktemp("school"))
