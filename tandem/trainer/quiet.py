"""Run a config a second time without traces: it writes only to a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.written import remade
from tandem.memory.levers import with_values


def quiet(config: TrainConfig, folder: Path, steps: int | None, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the config of the same run as a new run that does not validate, save checkpoints or log.

    Args:
        config: The config of the run.
        folder: The folder to write to.
        steps: The number of training steps; None for as many as the epochs give.
        changes: Other values by dotted key, which take precedence.

    Raises:
        pydantic.ValidationError: A value is wrong.
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
