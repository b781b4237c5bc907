"""Schedules of generation and training, against a simulation of both sides."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tandem.cli.main import main
from tandem.config.load import load_train_config
from tandem.errors import ConfigError
from tandem.memory.device_file import Device
from tandem.memory.plan import GIB, Plan, plan
from tandem.memory.schedules import chosen, compare
from tandem.memory.seconds import Lengths, Rates
from tandem.memory.shapes import shape_of
from tandem.memory.timing import Clock, Stages
from tests.memory.test_plan import BASE
from tests.support.words import words as full_words

LENGTHS = Lengths(np.full(64, 1024), np.full((64, 8), 1024))


def simulated(stages: Stages, *, ahead: bool, steps: int = 200) -> tuple[float, dict[str, float]]:
    """Simulate steps. Return the seconds of one, and the share of it that each side waits.

    Each side does one thing at a time. Weights are transferred when both are free.
    """
    free, busy = {"training": 0.0, "rollout": 0.0}, {"training": 0.0, "rollout": 0.0}
    written: dict[int, float] = {}

    def works(side: str, seconds: float, after: float = 0.0) -> float:
        free[side] = max(free[side], after) + seconds
        busy[side] += seconds
        return free[side]

    def write(step: int) -> None:
        together = max(free.values())
        works("training", stages.transfer, together)
        works("rollout", stages.transfer, together)
        written[step] = works("rollout", stages.generation)

    for step in range(steps):
        if step not in written:
            write(step)
        if ahead:
            write(step + 1)
        works("training", stages.training, written[step])
    end = max(free.values())
    return end / steps, {side: 1 - each / end for side, each in busy.items()}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seconds", [(5, 3, 1), (2, 7, 0), (4, 4, 0.5)])
def test_a_step_takes_what_a_simulation_of_both_sides_takes(seconds, ahead):
    stages = Stages(*seconds)
    step, waits = simulated(stages, ahead=ahead)
    assert stages.step(ahead=ahead) == pytest.approx(step, rel=0.02)
    found = compared(lambda config, _: stages)
    (each,) = (one for one in found if one.staleness == ahead and one.keys)
    assert each.waits == pytest.approx(waits, abs=0.02)
    assert each.step == stages.step(ahead=ahead)


@dataclass
class Told:
    """A judge with given seconds."""

    stages: Any
    device: float
    accepts: Any

    def plan(self, config: Any) -> Plan:
        return plan(config, shape_of, self.device)


def compared(stages, *words, accepts=lambda keys: True, device=1000.0):
    config = load_train_config(None, [*BASE, *full_words(*words)], elsewhere=True).config
    return compare(config, Told(stages, device * GIB, accepts))


def ideal(config: Any, _: Any) -> Stages:
    """Return seconds for twelve device seconds of generation and four of training."""
    return Stages(12 / config.trainer.devices_of("rollout"), 4 / config.trainer.devices_of("actor"), 0.0)


def test_the_best_split_is_the_one_that_balances_both_sides():
    together, apart, ahead = compared(ideal)
    assert (together.training, together.rollout, together.step) == (8, 8, 2.0)
    assert (ahead.training, ahead.rollout, ahead.step) == (2, 6, 2.0)
    assert ahead.waits == {"training": 0, "rollout": 0}
    tried = {k: 12 / k + 4 / (8 - k) for k in range(1, 8)}
    best = min(tried, key=lambda k: tried[k])
    assert apart.rollout == best and apart.step == pytest.approx(tried[best])
    assert apart.keys == {
        "trainer.resource_pools": {"training": (8 - best,), "rollout": (best,)},
        "trainer.placement": {"rollout": "rollout"},
    }
    assert chosen([together, apart, ahead]) is together
    assert together.waits == {"training": 0, "rollout": 0} and together.keys == {}
    assert set(apart.left) == {"training", "rollout"} and len(together.left) == 1


def test_splits_suit_the_sizes_and_the_rules():
    _, apart, ahead = compared(ideal, "R.tensor_model_parallel_size=2 FS.tensor_parallel_size=4")
    assert apart.training == ahead.training == 4 == ahead.rollout
    tried: list[Mapping[str, Any]] = []

    def accepts(keys: Any) -> bool:
        tried.append(keys["trainer.resource_pools"])
        return len(tried) > 14

    compared(ideal, "trainer.nnodes=2", accepts=accepts)
    assert {"training": (8, 4), "rollout": (4,)} in tried
    assert {"training": (4,), "rollout": (4, 8)} in tried
    with pytest.raises(ConfigError, match="no split of the devices"):
        compared(ideal, accepts=lambda keys: False)


def test_what_does_not_fit_comes_last():
    """One device for training would be fastest, but has no room for the weights and moments of a 7B model."""

    def costly(config: Any, _: Any) -> Stages:
        return Stages(1.0, float(config.trainer.devices_of("actor")), 0.0)

    _, apart, ahead = compared(costly, device=80)
    assert min(apart.left.values()) >= 0 and apart.training == ahead.training > 1
    assert compared(costly)[1].training == 1


def test_stages_are_the_step_taken_apart():
    config = load_train_config(None, list(BASE), elsewhere=True).config
    clock = Clock.of({}, "H100", 80, cuda=True)
    assert clock is not None
    shape = shape_of("Qwen/Qwen2.5-7B")
    whole, stages = clock.step(config, shape, LENGTHS), clock.stages(config, shape, LENGTHS)
    assert stages.step(ahead=False) == pytest.approx(whole["step"])
    assert stages.generation == pytest.approx(whole["generate_sequences"] + whole["reward"])
    assert stages.transfer == pytest.approx(whole["weights"])
    pools = full_words("P={rollout: b} Q={a: [4], b: [4]}")
    apart = load_train_config(None, [*BASE, *pools], elsewhere=True).config
    found = clock.stages(apart, shape, LENGTHS)
    sent = 2 * (shape.matrices + shape.embedding) / 450e9
    assert found.transfer == pytest.approx(whole["weights"] + sent)
    half = clock.step(apart, shape, LENGTHS)
    assert half["generate_sequences"] > 1.2 * whole["generate_sequences"]
    assert found.generation == pytest.approx(half["generate_sequences"] + half["reward"])
    assert found.step(ahead=False) == pytest.approx(half["step"] + sent)


def test_rewards_belong_to_generation():
    """A reward takes a millisecond, as was measured."""
    config = load_train_config(None, list(BASE), elsewhere=True).config
    measured = Device(Rates(1e15, 3e12), 2, {"reward": [0.0, 0.0, 0.0, 0.0, 1e-3]})
    clock = Clock.of({"NVIDIA H100 80GB": measured}, "H100", 80, cuda=True)
    assert clock is not None
    run = config, shape_of("Qwen/Qwen2.5-7B"), LENGTHS
    whole, stages = clock.step(*run), clock.stages(*run)
    assert whole["reward"] > 0.01
    assert stages.generation == pytest.approx(whole["generate_sequences"] + whole["reward"])


def test_the_command_compares_and_chooses(capsys):
    words = ["plan", *BASE, "--devices", "8xH100", "--schedule"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["schedules"]
    assert [row["staleness"] for row in rows] == [0, 0, 1]
    assert rows[0]["step"] == pytest.approx(found["time"]["phases"]["step"])
    assert rows[0]["step"] < rows[1]["step"] and found["choose"] == rows[0]["name"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "choose synchronous, together" in out and "cannot train one step off" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "80GB", "trainer.n_gpus_per_node=1"), "one device cannot be divided"),
        (("algorithm.filter_groups.enable=true",), "generated in advance"),
        (("trainer.resource_pools={a: [4], b: [4]}",), "already have devices"),
        (("trainer.device=cpu",), "run `tandem bench` once"),
        (("--fit", "8x80GB"), "exclude each other"),
    ],
)
def test_what_is_refused(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["plan", *BASE, "--schedule", *words]) == 1
    assert said in capsys.readouterr().err
