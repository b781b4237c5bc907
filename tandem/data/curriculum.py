"""Samplers: prompts drawn in an order that depends on earlier rewards.

You can write your own sampler. Put a class into a file and name both with `data.sampler.class_path` and
`data.sampler.class_name`:

    class Mine:
        def __init__(self, dataset, *, batch_size, seed): ...   # and data.sampler.kwargs by name
        def draw(self, count): ...                   # return the numbers of `count` different rows
        def update(self, rows, rewards): ...         # receive the mean rewards of some rows
        def state_dict(self): ...                    # return plain values for a checkpoint
        def load_state_dict(self, state): ...

`len(dataset)` is the number of training prompts. `dataset.records(rows)` returns the columns of some rows as
stored in the data files, and `dataset[row]` returns the columns of one row.

A class with `__iter__` and without `draw` is treated as a sampler of verl. It is created with `data_source`
and `data_config`. A method `update` receives a batch with `token_level_scores` and the columns of the rows.
Each pass over the sampler yields complete batches. After a resume, the sampler continues from its
`state_dict`. If the class lacks `state_dict` and `load_state_dict`, Tandem skips the rows that were already
drawn. This is an error if the class has `update`, because its order would then differ from the order of the
first run.

The sampler runs in the process that reads the data. The sampler receives the rewards of every generation
batch before it draws the next batch. So a run that was killed continues with exactly the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from omegaconf import OmegaConf

from tandem.data.prompts import PromptDataset
from tandem.errors import ConfigError, DataError
from tandem.loading import load_module
from tandem.protocol import DataProto

BUILT_IN = "tandem.data.curriculum"
_METHODS = ("draw", "update", "state_dict", "load_state_dict")


class Sampler(Protocol):
    """The interface of a sampler; the module's docstring describes it."""

    def draw(self, count: int) -> Sequence[int]:
        """Return the numbers of `count` different rows, counted from 0."""
        ...

    def update(self, rows: np.ndarray, rewards: np.ndarray) -> None:
        """Record the mean reward of the responses to some rows.

        Args:
            rows: (P) int64, different row numbers.
            rewards: (P) float64.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PassRateSampler:
    """A sampler that prefers prompts that the model answers well only sometimes.

    A row is drawn with the weight p (1 - p) + floor. Here p is a running mean of the row's rewards, clamped
    to 0 … 1, and p (1 - p) is the variance of a reward that is 0 or 1. A group whose rewards do not vary has
    zero advantages.

    When to use: rewards of 0 to 1 on data of mixed difficulty, above all without dynamic sampling.
    Watch: `reward/mean` moves towards one half; `training/epoch` no longer means that each prompt came once.
    Cost: nothing.

    Args:
        dataset: The dataset of training prompts.
        batch_size: Rows per batch.
        seed: The seed of the draws.
        start: The value of p before the row's first reward.
        momentum: The weight of earlier rewards in the running mean, at least 0 and below 1.
        floor: The extra weight of every row. It must be above 0, so that rows with p = 0 or p = 1 are still
            drawn.

    Raises:
        ConfigError: A setting is out of range.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        *,
        batch_size: int,
        seed: int,
        start: float = 0.5,
        momentum: float = 0.5,
        floor: float = 0.05,
    ) -> None:
        for name, given, fits, expected in (
            ("start", start, 0 <= start <= 1, "0 to 1"),
            ("momentum", momentum, 0 <= momentum < 1, "0 to below 1"),
            ("floor", floor, floor > 0, "above 0"),
        ):
            if not fits:
                field = f"data.sampler.kwargs.{name}"
                raise ConfigError("out of range", field=field, got=given, expected=expected)
        self._rates = np.full(len(dataset), start)
        self._momentum, self._floor = momentum, floor
        self._random = np.random.Generator(np.random.PCG64(seed))

    def draw(self, count: int) -> Sequence[int]:
        weights = self._rates * (1 - self._rates) + self._floor
        rows: list[int] = self._random.choice(
            len(weights), size=count, replace=False, p=weights / weights.sum()
        ).tolist()
        return rows

    def update(self, rows: np.ndarray, rewards: np.ndarray) -> None:
        past = self._momentum * self._rates[rows]
        self._rates[rows] = past + (1 - self._momentum) * np.clip(rewards, 0, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self._rates.tolist(), "random": self._random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rates[: len(state["rates"])] = state["rates"]  # rows added since have no rate yet
        self._random.bit_generator.state = state["random"]


def load_sampler(
    dataset: PromptDataset,
    *,
    path: str | None,
    name: str,
    batch_size: int,
    seed: int,
    kwargs: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
) -> Sampler:
    """Create the sampler that the config names.

    Args:
        dataset: The dataset of training prompts.
        path: A Python file or a module; None: this module.
        name: The name of the class.
        batch_size: Rows per batch.
        seed: The seed of the sampler's draws.
        kwargs: Additional arguments of the class.
        config: The `data` section of the config, for samplers of verl.

    Raises:
        ConfigError: The file or class does not exist, the class lacks a method, or it rejects the arguments.
    """
    module, name = load_module(f"{path or BUILT_IN}:{name}")
    found = getattr(module, name, None)
    field, known = "data.sampler.class_name", f"{name} in {path or BUILT_IN}"
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError("no such class", field=field, got=known, expected=f"one of {', '.join(classes)}")
    iterated = hasattr(found, "__iter__") and not hasattr(found, "draw")
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing and not iterated:
        raise ConfigError(
            "the sampler class lacks required methods",
            field=field,
            got=f"{known} without {', '.join(missing)}",
            expected=f"the methods {', '.join(_METHODS)}; {BUILT_IN} describes them",
        )
    given = {"batch_size": batch_size, "seed": seed, **kwargs}
    if iterated:
        given = {"data_source": dataset, "data_config": OmegaConf.create(dict(config or {})), **kwargs}
    try:
        made: Any = found(**given) if iterated else found(dataset, **given)
    except TypeError as error:
        first = "" if iterated else "dataset, "
        raise ConfigError(
            f"the sampler cannot be created: {error}",
            field="data.sampler.kwargs",
            got=f"{name}({first}{', '.join(f'{key}=…' for key in given)})",
            remedy="let the constructor accept these arguments by these names",
        ) from error
    return IteratedSampler(made, dataset) if iterated else made


class IteratedSampler:
    """An adapter for samplers of verl, which are iterables of row numbers.

    Args:
        sampler: An iterable that yields row numbers.
        dataset: The dataset of the rows.
    """

    def __init__(self, sampler: Any, dataset: PromptDataset) -> None:
        self._sampler, self._dataset = sampler, dataset
        self._rows = iter(sampler)
        self._draws: list[int] = []

    def draw(self, count: int) -> Sequence[int]:
        """Return the next `count` rows of this pass over the sampler.

        If fewer than `count` rows are left in this pass, start the next pass.
        """
        rows = list(islice(self._rows, count))
        if len(rows) < count:
            self._rows = iter(self._sampler)
            rows = list(islice(self._rows, count))
        self._draws.append(count)
        return rows

    def update(self, rows: np.ndarray, rewards: np.ndarray) -> None:
        """Pass the rewards to the sampler, if it has an `update` method."""
        if hasattr(self._sampler, "update"):
            columns = self._dataset.batch(rows.tolist(), uid_prefix="seen").non_tensor_batch
            scores = torch.from_numpy(rewards).float()
            batch = DataProto({"token_level_scores": scores[:, None], "scores": scores}, columns)
            self._sampler.update(batch)

    def state_dict(self) -> dict[str, Any]:
        own = self._sampler.state_dict() if hasattr(self._sampler, "state_dict") else None
        return {"draws": self._draws, "own": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sampler's state.

        Raises:
            DataError: The sampler has an `update` method but cannot save its state.
        """
        if state["own"] is not None:
            self._sampler.load_state_dict(state["own"])
            self._rows, self._draws = iter(self._sampler), state["draws"]
            return
        if hasattr(self._sampler, "update"):
            raise DataError(
                "the sampler cannot continue where the checkpoint was saved",
                field="data.sampler.class_name",
                got=f"{type(self._sampler).__name__} with update and without state_dict",
                expected="state_dict and load_state_dict",
            )
        for count in state["draws"]:
            self.draw(count)


class DrawnBatches:
    """A sequence of batches whose rows a sampler draws.

    Args:
        dataset: The dataset of the rows.
        batch_size: Rows per batch.
        sampler: The sampler that draws the rows.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, sampler: Sampler) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._sampler = sampler
        self._drawn = 0

    def batch(self, number: int) -> DataProto:
        """Return the next batch.

        `number` must be the number of the next batch. The uids of the batch start with this number, because a
        row may be drawn several times.

        Raises:
            DataError: The sampler did not return the requested number of different rows.
        """
        assert number == self._drawn, (number, self._drawn)
        rows = [int(row) for row in self._sampler.draw(self._batch_size)]
        last = len(self._dataset) - 1
        if len(set(rows)) != self._batch_size or not all(0 <= row <= last for row in rows):
            raise DataError(
                "the sampler did not return different rows",
                field="data.sampler.class_name",
                got=f"{type(self._sampler).__name__}: {len(rows)} rows, {len(set(rows))} different, "
                f"{min(rows, default=None)} to {max(rows, default=None)}",
                expected=f"{self._batch_size} different rows from 0 to {last}",
            )
        self._drawn += 1
        return self._dataset.batch(rows, uid_prefix=str(number))

    def observe(self, batch: DataProto) -> None:
        """Pass the mean score of each prompt's responses to the sampler.

        Args:
            batch: A table with `index` and `scores`.
        """
        rows = self._dataset.rows_of(batch.non_tensor_batch["index"].astype(np.int64))
        once, place = np.unique(rows, return_inverse=True)
        scores = batch.dense("scores").double().numpy()
        self._sampler.update(once, np.bincount(place, scores) / np.bincount(place))

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "sampler": self._sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]
        self._sampler.load_state_dict(state["sampler"])
