"""Learning rates by step, compared with rates by hand and with transformers' schedules."""

import math

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from tandem.config.optim import OptimConfig
from tandem.engines.train.optim import learning_rate


def rates(total, **options):
    optim = OptimConfig(lr=2.0, **options)
    return [learning_rate(optim, step, total) for step in range(total + 2)]


WSD, STEEP = {"lr_scheduler_type": "wsd"}, {"lr_scheduler_type": "wsd", "lr_wsd_decay_style": "linear"}
HALF = {**STEEP, "lr_wsd_decay_ratio": 0.5}


@pytest.mark.parametrize(
    ("total", "options", "wanted"),
    [
        (3, {}, [2.0] * 5),
        (8, {"lr_warmup_steps": 4}, [0, 0.5, 1.0, 1.5, *[2.0] * 6]),
        (8, {"lr_warmup_steps_ratio": 0.5}, [0, 0.5, 1.0, 1.5, *[2.0] * 6]),
        (8, {"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.5}, [2.0] * 10),
        (6, {"lr_scheduler_type": "linear", "lr_warmup_steps": 2, "min_lr_ratio": 0.25},
         [0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.5, 0.5]),
        (8, HALF, [2.0] * 5 + [1.5, 1.0, 0.5, 0.0, 0.0]),
        (8, {**HALF, "lr_warmup_steps": 2, "min_lr_ratio": 0.5},
         [0.0, 1.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]),
        (4, {**STEEP, "lr_warmup_steps": 2, "lr_wsd_decay_ratio": 1.0}, [0.0, 1.0, 2.0, 1.0, 0.0, 0.0]),
        (20, STEEP, [2.0] * 19 + [1.0, 0.0, 0.0]),  # over a tenth unless told
    ],
)  # fmt: skip
def test_rates_by_hand(total, options, wanted):
    assert rates(total, **options) == wanted


def test_curves_end_at_their_floor():
    got = rates(4, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    parts = (0, 0.25, 0.5, 0.75, 1, 1)
    wanted = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2) for x in parts]
    assert got == pytest.approx(wanted, abs=1e-15)
    assert got[2] == pytest.approx(1.1) and got[4] == pytest.approx(0.2)
    root = rates(8, **WSD, lr_wsd_decay_ratio=0.5, min_lr_ratio=0.1)
    wanted = [2 * (0.1 + 0.9 * (1 - math.sqrt(y))) for y in parts]
    assert root[:4] == [2.0] * 4 and root[4:] == pytest.approx(wanted, abs=1e-15)


def test_the_config_may_name_the_span():
    optim = OptimConfig(lr=1.0, lr_scheduler_type="linear", total_training_steps=10)
    assert learning_rate(optim, 5, 1000) == 0.5


SPAN = {"num_training_steps": 20}
DECAY = {**SPAN, "num_decay_steps": 5}
SAME = {
    "constant": (get_constant_schedule_with_warmup, {}, {}),
    "linear": (get_linear_schedule_with_warmup, SPAN, {}),
    "cosine": (
        *(get_cosine_with_min_lr_schedule_with_warmup, {**SPAN, "min_lr_rate": 0.1}),
        {"min_lr_ratio": 0.1},
    ),
    "wsd": (get_wsd_schedule, {**DECAY, "decay_type": "1-sqrt"}, {"lr_wsd_decay_ratio": 0.25}),
    "wsd linear": (
        *(get_wsd_schedule, {**DECAY, "decay_type": "linear"}),
        {"lr_wsd_decay_ratio": 0.25, "lr_wsd_decay_style": "linear"},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_curves_are_transformers_own(name):
    make, theirs, ours = SAME[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=2.0)
    schedule = make(optimizer, num_warmup_steps=3, **theirs)
    wanted = []
    for _ in range(21):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    found = rates(20, lr_scheduler_type=name.split()[0], lr_warmup_steps=3, **ours)[:21]
    assert found == pytest.approx(wanted, abs=1e-12)
    assert len(set(found)) > 3
