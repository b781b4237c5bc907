"""Find models and datasets of the Hugging Face hub, in its cache or over the network."""

from __future__ import annotations

import functools
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from tandem.errors import ConfigError, TandemError

SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""All files except weights."""
WEIGHTS = ("*.safetensors",)
DATA = "hf:"
"""The start of a dataset's name in place of a data file: `hf:OWNER/NAME?split=train&name=main`."""
DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*\w")
_SNAPSHOT = re.compile(r"models--(.+)/snapshots/([^/]+)$")


@dataclass(frozen=True, slots=True)
class Found:
    """The result of `find`: the snapshot of a model, or the reason why there is none.

    Attributes:
        folder: the folder of the snapshot, perhaps without weights; None if there is no snapshot.
        problem: the reason if there is no snapshot.
    """

    folder: str | None
    problem: str = ""


def is_name(path: str) -> bool:
    """Return whether a path can be a name on the hub: it has the form OWNER/NAME and does not exist here."""
    return _NAME.fullmatch(path) is not None and not os.path.exists(path)


@functools.lru_cache(maxsize=64)
def find(name: str) -> Found:
    """Return the snapshot of a model.

    If the cache has a snapshot, that snapshot is used, so that a run continues with the same model.
    Otherwise, the newest snapshot of the hub is downloaded, without its weights.
    """
    with suppress(FileNotFoundError):  # not in the cache
        return Found(_snapshot(name, local_files_only=True))
    try:
        return Found(_snapshot(name, allow_patterns=list(SMALL)))
    except Exception as error:  # errors of several libraries: no network, no such name, no permission
        return Found(None, _told(error))


def fetch_weights(folder: str) -> None:
    """Download the weights of a snapshot that lacks its weights.

    Raises:
        TandemError: the download failed.
    """
    found = _SNAPSHOT.search(os.path.abspath(folder))
    if found is None or _has_weights(folder):
        return
    name, revision = found[1].replace("--", "/"), found[2]
    problem = "the hub has none, or HF_HUB_OFFLINE is set"
    try:
        _snapshot(name, revision=revision, allow_patterns=list(WEIGHTS))
    except Exception as error:  # errors of several libraries
        problem = _told(error)
    if not _has_weights(folder):
        raise TandemError(
            "the model's weights are not in the cache and could not be downloaded",
            field=name,
            got=problem,
            remedy=remedy(name),
        )


def _has_weights(folder: str) -> bool:
    return any(path.suffix in (".safetensors", ".bin") for path in Path(folder).iterdir())


def remedy(name: str) -> str:
    """Return advice for the case that a model cannot be downloaded."""
    return (
        f"run `hf download {name}` where there is a network, then give the folder that it prints; for a "
        "mirror set HF_ENDPOINT, for a gated model set HF_TOKEN"
    )


def data_files(reference: str) -> list[str]:
    """Return the files of a dataset on the hub; for any other data file, return [reference].

    The files come from the cache if it has all of them, otherwise from the hub. The files of a split
    contain its name as a word, or are in a folder with this name.

    Args:
        reference: `hf:OWNER/NAME?split=SPLIT&name=FOLDER`; default of the split: `train`. The folder is
            needed if several folders of the dataset have the split.

    Raises:
        ConfigError: the reference cannot be parsed; or the dataset cannot be downloaded, has no files of the
            split, or has several folders.
    """
    if not reference.startswith(DATA):
        return [reference]
    name, _, query = reference.removeprefix(DATA).partition("?")
    asked = {"split": "train", "name": "", **dict(parse_qsl(query))}
    if len(asked) > 2 or not _NAME.fullmatch(name):
        form = f"{DATA}OWNER/NAME?split=train&name=FOLDER"
        raise ConfigError("this is not a dataset of the hub", got=reference, expected=form)
    problem, patterns = "", [f"*{asked['split']}*{suffix}" for suffix in DATA_SUFFIXES]
    tries: tuple[dict[str, Any], ...] = ({"local_files_only": True}, {"allow_patterns": patterns})
    for options in tries:
        try:
            folder = Path(_snapshot(name, repo_type="dataset", **options))
        except Exception as error:  # errors of several libraries: not in the cache, no network, no such name
            problem = _told(error)
            continue
        found = _of_split(folder, asked["split"], asked["name"])
        if len(found) > 1:
            raise ConfigError(
                f"this dataset has {asked['split']} in several folders",
                got=reference,
                expected=" or ".join(f"name={each}" for each in found),
            )
        for files in found.values():
            most = re.search(r"-of-(\d+)", files[0])
            if most is None or int(most[1]) == len(files):
                return files
        problem = f"the files in {folder} do not contain all of {asked['split']}"
    cache = import_module("huggingface_hub").constants.HF_HUB_CACHE
    raise ConfigError(
        "the hub has no dataset of that name that can be downloaded here",
        got=f"{reference} ({problem})",
        expected=f"its files in the cache, {cache}, or a network",
        remedy=f"run `hf download --repo-type dataset {name}` where there is a network, then set HF_HOME, or "
        "give its files as data files",
    )


def _of_split(folder: Path, split: str, part: str) -> dict[str, list[str]]:
    """Return a dict from folder to the split's data files; file or folder name has the split's name."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(split)}(?![A-Za-z0-9])")
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if path.suffix in DATA_SUFFIXES and word.search(str(place)) and (not part or part in place.parts):
            found.setdefault(str(place.parent), []).append(str(path))
    return found


def _snapshot(name: str, **options: Any) -> str:
    """Return the local folder of a snapshot of a Hub repository.

    The Hub library is imported inside this function, because the import takes a second and is rarely needed.
    """
    return str(import_module("huggingface_hub").snapshot_download(name, **options))


def _told(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"
