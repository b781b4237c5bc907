import math

import pytest

from tandem.config.optim import OptimConfig
from tandem.engines.train.optim import learning_rate


def rates(total, **options):
    optim = OptimConfig(lr=2.0, **options)
    return [learning_rate(optim, step, total) for step in range(total + 2)]


def test_constant():
    assert rates(3) == [2.0] * 5


def test_warm_up_by_steps_and_by_ratio():
    assert rates(8, lr_warmup_steps=4) == [0, 0.5, 1.0, 1.5, *[2.0] * 6]
    assert rates(8, lr_warmup_steps_ratio=0.5) == rates(8, lr_warmup_steps=4)
    assert rates(8, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5) == [2.0] * 10


def test_linear_ends_at_its_floor():
    got = rates(6, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.25)
    assert got == [0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.5, 0.5]


def test_cosine():
    got = rates(4, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    wanted = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2) for x in (0, 0.25, 0.5, 0.75, 1, 1)]
    assert got == pytest.approx(wanted, abs=1e-15)
    assert got[2] == pytest.approx(1.1) and got[4] == pytest.approx(0.2)


def test_the_config_may_name_the_span():
    optim = OptimConfig(lr=1.0, lr_scheduler_type="linear", total_training_steps=10)
    assert learning_rate(optim, 5, 1000) == 0.5
