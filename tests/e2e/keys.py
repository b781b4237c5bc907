from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from tandem.observability.run import read_samples
from tests.support.runs import Finished
from tests.support.words import full

Test = TypeVar("Test", bound=Callable[..., None])

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
TRIED: set[str] = set()
"""The keys that a test changes."""


def tries(names: str) -> Callable[[Test], Test]:
    TRIED.update(full(names).split())
    return lambda test: test


@pytest.fixture(scope="module")
def base(shop):
    return shop.run("base")


def responses(run: Finished, step: int = 1) -> list[list[int]]:
    rows = run.each(step, "tokens", "response_mask")
    return [[t for t, written in zip(tokens, mask, strict=True) if written] for tokens, mask in rows]


def flat(run: Finished, step: int, *columns: str) -> list[np.ndarray]:
    """Return columns with one value per token, at the response tokens."""
    samples = run.samples(step)
    mask = np.concatenate([np.array(row) for row in samples["response_mask"]])
    return [np.concatenate([np.array(row) for row in samples[name]])[mask] for name in columns]


def validated(run: Finished, step: int = 0) -> dict[str, list[Any]]:
    return read_samples(run.folder / "samples" / f"step_{step:06d}_val.parquet")
