"""Derive a config that repeats a run in a separate folder, without logs, checkpoints or validation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.written import remade
from tandem.memory.levers import with_values


def quiet(config: TrainConfig, folder: Path, steps: int | None, changes: Mapping[str, Any]) -> TrainConfig:
    """Return a copy of the config for a new run that does not validate, save checkpoints or log.

    Args:
        config: The config of the run.
        folder: The folder to write to.
        steps: The number of training steps; None: it follows from the number of epochs.
        changes: A dict from dotted key to value. These values take precedence.

    Raises:
        pydantic.ValidationError: A value in `changes` is invalid.
    """
    values = {
        "trainer.default_local_dir": str(folder),
        "trainer.total_training_steps": steps,
        "trainer.resume_mode": "disable",
        "trainer.resume_from_path": None,
        "trainer.logger": (),
        "trainer.save_freq": -1,
        "trainer.async_save": False,
        "trainer.keep_best": None,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.val_only": False,
        "trainer.log_val_generations": 0,
    }
    return remade(config, with_values(config, values | dict(changes)).model_dump())
