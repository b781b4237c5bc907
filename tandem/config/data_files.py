"""Find the data files that the value of a config key names.

A value can name a file, a folder, a glob pattern, a dataset saved by `datasets`, or a dataset on the Hugging
Face hub.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from tandem import hub
from tandem.errors import ConfigError
from tandem.tasks import is_task
from tandem.texts import parse_json

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow", ".feather", ".jsonl.gz", ".json.gz", ".csv.gz")


def files_of(reference: str) -> list[str]:
    """Return the data files, sorted by name; [reference] if the reference is a single file or a task.

    Raises:
        ConfigError: a folder or pattern has no data files, a saved dataset has several splits, or
            `tandem.hub.data_files` raises the error.
    """
    if reference.startswith(hub.DATA):
        return hub.data_files(reference)
    path = Path(reference).expanduser()
    if is_task(reference) or path.is_file():
        return [reference]
    if path.is_dir():
        found = _in_folder(path)
    elif glob.has_magic(reference):
        found = sorted(filter(lambda each: Path(each).is_file(), glob.glob(str(path), recursive=True)))
    else:
        return [reference]  # it does not exist; the key's rule reports it
    if not found:
        wanted = f"files whose names end in {', '.join(SUFFIXES)}"
        raise ConfigError("no data files found", got=reference, expected=wanted)
    return found


def _in_folder(folder: Path) -> list[str]:
    splits, saved = folder / "dataset_dict.json", folder / "state.json"
    if splits.is_file():
        expected = " or ".join(str(folder / name) for name in _listed(splits, "splits"))
        raise ConfigError("this dataset has several splits", got=str(folder), expected=expected)
    if saved.is_file():
        return [str(folder / part["filename"]) for part in _listed(saved, "_data_files")]
    return sorted(str(file) for file in folder.iterdir() if file.name.endswith(SUFFIXES))


def _listed(file: Path, name: str) -> list[Any]:
    """Return the list that is stored under the key `name` in a JSON file of `datasets`."""
    try:
        return list(parse_json(file.read_bytes())[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "this is not a file of a saved dataset", field=str(file), got=str(error)[:200]
        ) from error
