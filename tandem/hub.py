"""Models by their name on the Hugging Face hub, from its cache or over the network."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tandem.errors import TandemError

SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""All files but weights."""
WEIGHTS = ("*.safetensors",)
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
    try:
        return Found(_snapshot(name, local_files_only=True))
    except FileNotFoundError:  # not in the cache
        pass
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


def _snapshot(name: str, **options: Any) -> str:
    """The folder of a snapshot. The library takes a second to import, and most models are folders."""
    return str(import_module("huggingface_hub").snapshot_download(name, **options))


def _told(error: Exception) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"
