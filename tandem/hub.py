"""Models and data sets by their name on the Hugging Face hub, from its cache or over the network."""

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
"""All files but weights."""
WEIGHTS = ("*.safetensors",)
DATA = "hf:"
"""What a data set's name begins with, where a data file may stand: `hf:OWNER/NAME?split=train&name=main`."""
DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*\w")
_SNAPSHOT = re.compile(r"models--(.+)/snapshots/([^/]+)$")


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a name.

    Attributes:
        folder: the snapshot's folder, with all but perhaps the weights; None where there is none.
        problem: why there is none.
    """

    folder: str | None
    problem: str = ""


def is_name(path: str) -> bool:
    """Whether a path can be a name on the hub: OWNER/NAME, where no such folder is here."""
    return _NAME.fullmatch(path) is not None and not os.path.exists(path)


@functools.lru_cache(maxsize=64)
def find(name: str) -> Found:
    """The snapshot of a model: that in the cache if there is one, so that a run goes on with the same; else
    the hub's newest, of which everything but the weights is downloaded."""
    with suppress(FileNotFoundError):  # not in the cache
        return Found(_snapshot(name, local_files_only=True))
    try:
        return Found(_snapshot(name, allow_patterns=list(SMALL)))
    except Exception as error:  # of many libraries: no network, no such name, no permission
        return Found(None, _told(error))


def fetch_weights(folder: str) -> None:
    """Downloads the weights of a snapshot that has none.

    Raises:
        TandemError: it could not be done.
    """
    found = _SNAPSHOT.search(os.path.abspath(folder))
    if found is None or _has_weights(folder):
        return
    name, revision = found[1].replace("--", "/"), found[2]
    problem = "the hub has none, or HF_HUB_OFFLINE is set"
    try:
        _snapshot(name, revision=revision, allow_patterns=list(WEIGHTS))
    except Exception as error:  # of many libraries
        problem = _told(error)
    if not _has_weights(folder):
        raise TandemError(
            "its weights are not in the cache and could not be downloaded",
            field=name,
            got=problem,
            remedy=remedy(name),
        )


def _has_weights(folder: str) -> bool:
    return any(path.suffix in (".safetensors", ".bin") for path in Path(folder).iterdir())


def remedy(name: str) -> str:
    """What to do where a model cannot be had."""
    return (
        f"`hf download {name}` where there is a network, then give the folder it prints; HF_ENDPOINT names "
        "a mirror, HF_TOKEN opens what is gated"
    )


def data_files(reference: str) -> list[str]:
    """A data file as it is, or the files of a split of a data set: those in the cache if all of them are
    there, else the hub's, which are downloaded. A split's files have its name as a word in theirs, or lie in
    a folder of that name.

    Args:
        reference: `hf:OWNER/NAME?split=SPLIT&name=FOLDER`; the split is `train` unless it is given, the
            folder is needed where the data set has several of that split.

    Raises:
        ConfigError: it cannot be read; the data set cannot be had, has no such files, or has several folders.
    """
    if not reference.startswith(DATA):
        return [reference]
    name, _, query = reference.removeprefix(DATA).partition("?")
    asked = {"split": "train", "name": "", **dict(parse_qsl(query))}
    if len(asked) > 2 or not _NAME.fullmatch(name):
        form = f"{DATA}OWNER/NAME?split=train&name=FOLDER"
        raise ConfigError("is not a data set of the hub", got=reference, expected=form)
    problem, patterns = "", [f"*{asked['split']}*{suffix}" for suffix in DATA_SUFFIXES]
    tries: tuple[dict[str, Any], ...] = ({"local_files_only": True}, {"allow_patterns": patterns})
    for options in tries:
        try:
            folder = Path(_snapshot(name, repo_type="dataset", **options))
        except Exception as error:  # of many libraries: not in the cache, no network, no such name
            problem = _told(error)
            continue
        found = _of_split(folder, asked["split"], asked["name"])
        if len(found) > 1:
            raise ConfigError(
                f"has {asked['split']} in several folders",
                got=reference,
                expected=" or ".join(f"name={each}" for each in found),
            )
        for files in found.values():
            most = re.search(r"-of-(\d+)", files[0])
            if most is None or int(most[1]) == len(files):
                return files
        problem = f"no whole {asked['split']} among the files in {folder}"
    cache = import_module("huggingface_hub").constants.HF_HUB_CACHE
    raise ConfigError(
        "as a data set of the hub it cannot be had",
        got=f"{reference} ({problem})",
        expected=f"its files in the cache, {cache}, or a network",
        remedy=f"`hf download --repo-type dataset {name}` where there is a network, then HF_HOME, or its "
        "files as data files",
    )


def _of_split(folder: Path, split: str, part: str) -> dict[str, list[str]]:
    """By folder, the data files that have the split's name in theirs, or in that of their folder."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(split)}(?![A-Za-z0-9])")
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if path.suffix in DATA_SUFFIXES and word.search(str(place)) and (not part or part in place.parts):
            found.setdefault(str(place.parent), []).append(str(path))
    return found


def _snapshot(name: str, **options: Any) -> str:
    """The folder of a snapshot. The library takes a second to import, and most models are folders."""
    return str(import_module("huggingface_hub").snapshot_download(name, **options))


def _told(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"
