"""Users' files with reward functions, and pools that are closed after the test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.config.rewards import RewardConfig
from tandem.rewards import Pool, load_custom


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that writes a user's file, and loads one function of it."""

    def load(source: str, name: str = "compute_score", *, timeout: float = math.inf, **kwargs: Any) -> Any:
        (tmp_path / "own.py").write_text(source)
        return load_custom(str(tmp_path / "own.py"), name, kwargs, timeout=timeout)

    return load


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    """Yield a function that makes pools of a reward with the log `reward.log`."""
    pools: list[Pool] = []

    def make(reward: Any, say: Callable[[str], None] = print, **keys: Any) -> Pool:
        pools.append(Pool(reward, RewardConfig(**keys), tmp_path / "reward.log", say))
        return pools[-1]

    yield make
    for each in pools:
        each.close()
