"""A folder in which the files exist that converted configs name, and a loader of such configs."""

from pathlib import Path
from typing import Any

import pytest

from tandem.config.load import load_rm_config, load_sft_config, load_train_config
from tandem.config.schema import nested
from tandem.config.sources import to_yaml

LOADERS = {"train": load_train_config, "sft": load_sft_config, "rm": load_rm_config}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes and loads what a migration made."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "test.parquet", "reward.py"):
        (tmp_path / name).touch()
    for folder in ("model", "scorer"):
        (tmp_path / folder).mkdir()
        for name in ("config.json", "tokenizer_config.json"):
            (tmp_path / folder / name).write_text("{}")

    def run(made: Any) -> Any:
        (tmp_path / "made.yaml").write_text(to_yaml(nested(made.config)))
        return LOADERS[made.command]("made.yaml").config

    return run
