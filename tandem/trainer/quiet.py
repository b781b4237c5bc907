"""A run beside its own: the same config, with no trace but in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.written import remade
from tandem.memory.levers import with_values


def quiet(config: TrainConfig, folder: Path, steps: int | None, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the config of the same run, which begins anew and takes so many steps. It validates nothing,
    saves nothing and tells no logger.

    Args:
        folder: where it writes.
        steps: None for as many as the epochs give.
        changes: other values, by dotted key; they win.

    Raises:
        pydantic.ValidationError: a wrong value.
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
