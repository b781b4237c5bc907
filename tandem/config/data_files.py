"""The files that a data key names: a file, a folder, a pattern, a data set that `datasets` saved, one of the
hub."""

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
    """The files, in the order of their names, or the reference itself where it names one file or a task.

    Raises:
        ConfigError: a folder or pattern without data files, a saved data set of several splits, or what
            `tandem.hub.data_files` raises.
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
        return [reference]  # which is not there; the key's rule says so
    if not found:
        wanted = f"files that end in {', '.join(SUFFIXES)}"
        raise ConfigError("no data files there", got=reference, expected=wanted)
    return found


def _in_folder(folder: Path) -> list[str]:
    splits, saved = folder / "dataset_dict.json", folder / "state.json"
    if splits.is_file():
        expected = " or ".join(str(folder / name) for name in _listed(splits, "splits"))
        raise ConfigError("holds several splits", got=str(folder), expected=expected)
    if saved.is_file():
        return [str(folder / part["filename"]) for part in _listed(saved, "_data_files")]
    return sorted(str(file) for file in folder.iterdir() if file.name.endswith(SUFFIXES))


def _listed(file: Path, name: str) -> list[Any]:
    """What a file of `datasets` lists under a name."""
    try:
        return list(parse_json(file.read_bytes())[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("is no file of datasets", field=str(file), got=str(error)[:200]) from error
