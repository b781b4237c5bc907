"""Measure real training steps with dummy prompts, lengths and rewards."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tandem.bench.asked import MODEL_KEYS, Asked, as_benchmark, draw, load
from tandem.bench.dummy import write_dummy
from tandem.bench.parts import LENGTHS
from tandem.config.changed_models import stored_config
from tandem.config.root import TrainConfig
from tandem.memory.seconds import Lengths, Rates, Work, step_work
from tandem.memory.shapes import model_shape
from tandem.observability.run import read_metrics
from tandem.trainer.assembly import build_ppo
from tandem.trainer.session import WARNING


def measure(asked: Asked, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the steps, and return the report as JSON-like values.

    Raises:
        TandemError: the config, the lengths or the models are invalid.
    """
    config, given = load(asked.words, asked.folder, dummy=asked.dummy)
    drawn = draw(config, asked.prompts, asked.responses)
    config = as_benchmark(config, asked)
    stored = stored_config(config.actor_rollout_ref.model.path)
    shape = model_shape(stored)
    for key in MODEL_KEYS if asked.dummy else ():
        if key in given:
            name = key.partition(".")[0]
            write_dummy(asked.folder / name, scorer=name == "reward_model")
    _write_prompts(asked, drawn, shape.vocabulary)
    before = os.getloadavg()[0]
    device, rates = _run(config, say)
    rows = read_metrics(Path(config.trainer.default_local_dir) / "metrics.jsonl")
    measured = [_numbers(row) for row in rows if row["step"] > asked.warm_up]
    work = step_work(config, shape, drawn.prompts, drawn.responses.ravel(), item=device["bytes of a number"])
    versions = {name: version(name) for name in ("tandem", "torch", "transformers")}
    return {
        "command": shlex.join(["tandem", *sys.argv[1:]]),
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": {
            **device,
            "devices": config.trainer.world_size,
            "actor devices": config.trainer.devices_of("actor"),
            "rollout devices": config.trainer.devices_of("rollout"),
            "host": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
            "load before": round(before, 2),
            "load after": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), **versions},
        "model": stored,
        "config": given,
        "steps": asked.steps,
        "warm-up": asked.warm_up,
        "passes": config.actor_rollout_ref.actor.ppo_epochs,
        "lengths": {
            "prompts": asked.prompts or "the greatest",
            "responses": asked.responses or "the greatest",
            "total": drawn.total,
            "response": int(drawn.responses.sum()),
        },
        "rates": asdict(rates),
        "work": {phase: asdict(each) for phase, each in work.items()},
        "rows": _rows(measured, work, rates),
        "parts": step_parts(measured),
    }


def _run(config: TrainConfig, say: Callable[[str], None]) -> tuple[dict[str, Any], Rates]:
    """Run all steps. Return the device and its speeds.

    The speeds are measured before and after the steps, and the higher values are used. Warnings about a step
    are not printed, because prompts, weights and rewards are artificial.
    """
    trainer = build_ppo(config, say=lambda sentence: None if sentence.startswith(WARNING) else say(sentence))
    try:
        device, first = trainer.roles.actor.device_rates()
        with closing(trainer.steps()) as steps:
            for _ in steps:
                pass
            _, second = trainer.roles.actor.device_rates()
    finally:
        trainer.shutdown()
    return device, Rates(max(first.operations, second.operations), max(first.bytes, second.bytes))


def _write_prompts(asked: Asked, drawn: Lengths, vocabulary: int) -> None:
    """Write the data file: prompts of random tokens for each step, and the lengths of their responses."""
    rng = np.random.default_rng(1)
    order = [
        place for _ in range(asked.steps + asked.warm_up) for place in rng.permutation(len(drawn.prompts))
    ]
    columns = {
        "prompt": [rng.integers(0, vocabulary, drawn.prompts[place]).tolist() for place in order],
        "data_source": ["bench"] * len(order),
        "reward_model": [{"style": "rule", "ground_truth": ""}] * len(order),
        "extra_info": [{LENGTHS: drawn.responses[place].tolist()} for place in order],
    }
    pq.write_table(pa.table(columns), asked.folder / "prompts.parquet")


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a dict from phase to its seconds in a step, and the step's `response_length`."""
    timed = {name: value for name, value in row.items() if name.startswith("timing/")}
    timed["response_length"] = row["response_length/mean"]
    return {name.removeprefix("timing/").removesuffix("/mean"): value for name, value in timed.items()}


def _rows(steps: Sequence[Mapping[str, float]], work: Mapping[str, Work], rates: Rates) -> dict[str, Any]:
    """Return the figures of each phase.

    The figures are the median, minimum and maximum of the measured seconds, the floor (the shortest possible
    time at the given rates), and the floor divided by the median.
    """
    floors = {phase: each.floor(rates) for phase, each in work.items() if each.operations or each.bytes}
    floors |= {"step": sum(floors.values()), "reshard": floors["weights"]}
    floors["gen"] = floors["generate_sequences"] + floors["weights"]
    out = {}
    for phase in dict.fromkeys(name for row in steps for name in row):
        values = [row[phase] for row in steps if phase in row]
        middle = statistics.median(values)
        out[phase] = {"median": middle, "least": min(values), "most": max(values)}
        if phase in floors and middle > 0:
            out[phase] |= {"floor": floors[phase], "share": floors[phase] / middle}
    return out


def step_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of each phase of `step_work` in the median step.

    If steps differ, the medians of the phases do not sum to the median of the steps. The medians are scaled
    so that they do.

    Args:
        steps: for each step, a dict from a phase of the run's timeline to its seconds. A missing phase counts
            as 0 seconds.
    """
    each = [_apart(seconds) for seconds in steps]
    phases = dict.fromkeys(phase for parts in each for phase in parts)
    middle = {phase: statistics.median(parts.get(phase, 0.0) for parts in each) for phase in phases}
    scale = statistics.median(seconds["step"] for seconds in steps) / sum(middle.values())
    return {phase: seconds * scale for phase, seconds in middle.items()}


def _apart(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return a step's seconds for the phases of `step_work`, which do not overlap."""
    apart = ("reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
    found = {phase: seconds[phase] for phase in ("generate_sequences", *apart) if phase in seconds}
    found["weights"] = seconds["gen"] - seconds["generate_sequences"]
    found["rest"] = seconds["step"] - sum(found.values())
    return found
