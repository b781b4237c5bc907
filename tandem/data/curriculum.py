"""Samplers: the order in which prompts are drawn, where it follows what was observed of them.

A sampler of one's own is a class in a file, named by `data.sampler.class_path` and `.class_name`:

    class Mine:
        def __init__(self, dataset, *, batch_size, seed): ...   # and data.sampler.kwargs by name
        def draw(self, count): ...                   # the numbers of `count` different rows
        def update(self, rows, rewards): ...         # what was observed of some rows
        def state_dict(self): ...                    # plain values, for a checkpoint
        def load_state_dict(self, state): ...

`len(dataset)` is the number of training prompts, `dataset.records(rows)` what the data files say of some,
`dataset[row]` of one.

A class with `__iter__` and no `draw` is taken as one of verl's: it is made with `data_source` and
`data_config`, and its `update`, if there is one, gets a batch with `token_level_scores` and the rows'
columns. Each pass over it gives whole batches. It goes on after a resume by its `state_dict` and
`load_state_dict`; without them as many rows are passed over, and a class that has `update` is refused, for
it would not be where it was.

The sampler lives with the data. It is told of every generation batch before it is asked for the next one, so
that a run that was killed goes on exactly.
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
    """See the module's docstring."""

    def draw(self, count: int) -> Sequence[int]:
        """The numbers of `count` different rows, from 0."""
        ...

    def update(self, rows: np.ndarray, rewards: np.ndarray) -> None:
        """Takes note of the mean reward of the responses to some rows.

        Args:
            rows: (P) int64, each once.
            rewards: (P) float64.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PassRateSampler:
    """Draws prompts that are sometimes answered well more often than those that always or never are.

    A row is drawn with a weight of p (1 - p) + floor, where p is a running mean of its rewards, cut to 0 … 1:
    the variance of a reward of 0 or 1, which is what a group's advantages are made of.

    When to use: rewards of 0 to 1 on data of mixed difficulty, above all without dynamic sampling.
    Watch: `reward/mean` moves towards one half; `training/epoch` no longer says that each prompt came once.
    Cost: nothing.

    Args:
        dataset: of the training prompts.
        batch_size: rows of a batch.
        seed: of the draws.
        start: p of a row before its first reward.
        momentum: the weight of the running mean's past, from 0 to below 1.
        floor: the weight of rows that are certain; above 0, so that none is forgotten.

    Raises:
        ConfigError: a setting out of range.
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
        self._rates[: len(state["rates"])] = state["rates"]  # rows that were added have none yet
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
    """The sampler that the config names.

    Args:
        path: a Python file or a module; None: this one.
        name: the class.
        batch_size: rows of a batch.
        seed: for its draws.
        kwargs: further arguments.
        config: the data section, for a sampler of verl's kind.

    Raises:
        ConfigError: no such file or class, a class that lacks a method, or arguments that it does not take.
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
            "the sampler lacks methods that are called",
            field=field,
            got=f"{known} without {', '.join(missing)}",
            expected=f"the methods {', '.join(_METHODS)}; see {BUILT_IN}",
        )
    given = {"batch_size": batch_size, "seed": seed, **kwargs}
    if iterated:
        given = {"data_source": dataset, "data_config": OmegaConf.create(dict(config or {})), **kwargs}
    try:
        made: Any = found(**given) if iterated else found(dataset, **given)
    except TypeError as error:
        first = "" if iterated else "dataset, "
        raise ConfigError(
            f"the sampler cannot be made: {error}",
            field="data.sampler.kwargs",
            got=f"{name}({first}{', '.join(f'{key}=…' for key in given)})",
            remedy="take these arguments by these names",
        ) from error
    return IteratedSampler(made, dataset) if iterated else made


class IteratedSampler:
    """A sampler of verl's kind, which is iterated.

    Args:
        sampler: yields numbers of rows.
        dataset: of the rows.
    """

    def __init__(self, sampler: Any, dataset: PromptDataset) -> None:
        self._sampler, self._dataset = sampler, dataset
        self._rows = iter(sampler)
        self._draws: list[int] = []

    def draw(self, count: int) -> Sequence[int]:
        """The next rows of this pass, or, if it has not so many left, the first of the next."""
        rows = list(islice(self._rows, count))
        if len(rows) < count:
            self._rows = iter(self._sampler)
            rows = list(islice(self._rows, count))
        self._draws.append(count)
        return rows

    def update(self, rows: np.ndarray, rewards: np.ndarray) -> None:
        """Tells the sampler, if it wants to know."""
        if hasattr(self._sampler, "update"):
            columns = self._dataset.batch(rows.tolist(), uid_prefix="seen").non_tensor_batch
            scores = torch.from_numpy(rewards).float()
            batch = DataProto({"token_level_scores": scores[:, None], "scores": scores}, columns)
            self._sampler.update(batch)

    def state_dict(self) -> dict[str, Any]:
        own = self._sampler.state_dict() if hasattr(self._sampler, "state_dict") else None
        return {"draws": self._draws, "own": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            DataError: the sampler learns and cannot say what it has learnt.
        """
        if state["own"] is not None:
            self._sampler.load_state_dict(state["own"])
            self._rows, self._draws = iter(self._sampler), state["draws"]
            return
        if hasattr(self._sampler, "update"):
            raise DataError(
                "the sampler cannot go on where it was",
                field="data.sampler.class_name",
                got=f"{type(self._sampler).__name__} with update, and without state_dict",
                expected="state_dict and load_state_dict",
            )
        for count in state["draws"]:
            self.draw(count)


class DrawnBatches:
    """Batches whose rows a sampler draws, one after the other.

    Args:
        dataset: where rows come from.
        batch_size: rows per batch.
        sampler: draws them.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, sampler: Sampler) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._sampler = sampler
        self._drawn = 0

    def batch(self, number: int) -> DataProto:
        """The next batch; its number is the prefix of its uids, for a row may come again at any time.

        Raises:
            DataError: the sampler drew something else than so many different rows.
        """
        assert number == self._drawn, (number, self._drawn)
        rows = [int(row) for row in self._sampler.draw(self._batch_size)]
        last = len(self._dataset) - 1
        if len(set(rows)) != self._batch_size or not all(0 <= row <= last for row in rows):
            raise DataError(
                "the sampler drew something else than different rows",
                field="data.sampler.class_name",
                got=f"{type(self._sampler).__name__}: {len(rows)} rows, {len(set(rows))} different, "
                f"{min(rows, default=None)} to {max(rows, default=None)}",
                expected=f"{self._batch_size} different rows from 0 to {last}",
            )
        self._drawn += 1
        return self._dataset.batch(rows, uid_prefix=str(number))

    def observe(self, batch: DataProto) -> None:
        """Tells the sampler the mean score of each prompt's responses.

        Args:
            batch: `index` and `scores`.
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
