"""The schedules of verl's test_torch_functional.py, which run without a GPU; see docs/verl-tests.md."""

from __future__ import annotations

import pytest

from tandem.config.optim import OptimConfig
from tandem.engines.train.optim import learning_rate


@pytest.mark.parametrize(
    ("kind", "floor", "rates"),
    [
        ("constant", 0.0, [0.0, 0.0005, 0.001, 0.001, 0.001]),
        ("cosine", 0.1, [0.0, 0.0005, 0.001, 0.000775, 0.000325]),
    ],
)
def test_five_steps_two_of_them_warm_up(kind: str, floor: float, rates: list[float]) -> None:
    optim = OptimConfig(lr=1e-3, lr_warmup_steps=2, lr_scheduler_type=kind, min_lr_ratio=floor)
    assert [learning_rate(optim, step, 5) for step in range(5)] == pytest.approx(rates)
