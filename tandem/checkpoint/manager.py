"""Checkpoints of a run: one folder per step, written atomically, checked by digests when read.

checkpoints/step_000010/manifest.json   step, metric it is judged by, size and sha256 of every other file
                        state.pt        small state: counters, data position, controllers
                        NAME/…          what the writer of that name wrote: model shards, optimizer
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tandem.checkpoint.background import PendingSave, written_mark
from tandem.checkpoint.best import Best
from tandem.checkpoint.staging import REPLACED, TEMPORARY, files_below, recover, staged
from tandem.errors import CheckpointError, ConfigError
from tandem.observability.reading import bytes_below
from tandem.texts import parse_json
from tandem.unpickling import load_plain

_MANIFEST = "manifest.json"
_STATE = "state.pt"
_NAME = re.compile(r"step_(\d{6,})")
_FORMAT = 1
_REMEDY = "keep only plain values, tensors and numpy arrays in a state_dict of your own, such as a sampler's"
NO_METRICS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint found whole.

    Attributes:
        path: its folder; what the writers wrote stands in the subfolders of their names.
        step: training steps done.
        state: what was given to `save`.
    """

    path: Path
    step: int
    state: dict[str, Any]


class CheckpointManager:
    """The checkpoints below `root`, for the one process that writes them.

    On construction, what a killed process was writing or deleting is removed, and its replacements are ended,
    unless only reading is wanted.

    Args:
        root: the folder of checkpoints; made if missing.
        keep: how many to keep, the newest; None keeps all.
        best: the judge of which one is kept besides; None keeps none besides.
        log: is told, in a sentence, about each damaged checkpoint that is passed over.
        read_only: change nothing, for another process may be saving here.

    Attributes:
        judge: of the best; None where there is none.

    Raises:
        ConfigError: keep below one.
    """

    def __init__(
        self,
        root: Path,
        keep: int | None = None,
        *,
        best: Best | None = None,
        log: Callable[[str], None] = print,
        read_only: bool = False,
    ) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(
                "must keep at least one checkpoint",
                field="trainer.max_ckpt_to_keep",
                got=keep,
                expected=">= 1, or null to keep all",
            )
        self._root = Path(root)
        self._keep = keep
        self.judge = best
        self._log = log
        if read_only:
            return
        self._root.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._root.iterdir()):
            if _NAME.fullmatch(path.stem) and path.suffix == TEMPORARY:
                shutil.rmtree(path)
            elif _NAME.fullmatch(path.stem) and path.suffix == REPLACED:
                recover(path.with_suffix(""))

    def save(
        self,
        step: int,
        writers: Mapping[str, Callable[[Path], None]],
        state: Mapping[str, Any],
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> Path:
        """Writes a checkpoint and prunes old ones. A checkpoint of the same step is replaced.

        Args:
            step: training steps done.
            writers: name to a function that fills the empty folder it is given.
            state: small: plain values, tensors and numpy arrays.
            metrics: of the step; the judge of the best finds its own among them.

        Raises:
            CheckpointError: the disk is full or cannot be written, or the state holds other objects.
                Nothing of this checkpoint remains then, and all earlier ones are intact.
        """
        with self._staging(step) as folder:
            _begin(folder, writers)
            self._seal(folder, step, _pickled(state), metrics)
        self._prune(step)
        return self._path(step)

    def begin(
        self,
        step: int,
        starters: Mapping[str, Callable[[Path], None]],
        state: Mapping[str, Any],
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> PendingSave:
        """Writes a checkpoint while training goes on: returns as soon as all members have begun.

        Args:
            step, state, metrics: see `save`; the state is taken as it is now.
            starters: name to a function that begins to fill the empty folder it is given. Once the folder
                is full, somebody makes its `written_mark`.

        Raises:
            CheckpointError: as `save`; what happens later, `PendingSave.check` raises.
        """
        with ExitStack() as staging:
            folder = staging.enter_context(self._staging(step))
            _begin(folder, starters)
            pickled, judged = _pickled(state), dict(metrics)
            marks = [written_mark(folder / name) for name in starters]
            seal = partial(self._seal, folder, step, pickled, judged)
            return PendingSave(self._path(step), staging.pop_all(), marks, seal, partial(self._prune, step))

    def _path(self, step: int) -> Path:
        return self._root / f"step_{step:06d}"

    def _staging(self, step: int) -> AbstractContextManager[Path]:
        newest = max(self._folders().items(), default=None)
        return staged(self._path(step), needed=None if newest is None else bytes_below(newest[1]))

    def _seal(self, folder: Path, step: int, state: bytes, metrics: Mapping[str, float]) -> None:
        """All that is in a checkpoint's folder besides what its members wrote."""
        (folder / _STATE).write_bytes(state)
        judged = {}
        if self.judge is not None and (value := self.judge.value(metrics)) is not None:
            judged = {"metric": {"name": self.judge.metric, "value": value}}
        _write_manifest(folder, step, judged)

    def best(self, best: Best) -> Checkpoint | None:
        """The best checkpoint by its metric, of those saved while that was the judge; None without one.

        Raises:
            CheckpointError: it is damaged.
        """
        step = best.choose(self._values(best, self._folders()))
        return None if step is None else open_checkpoint(self._path(step))

    def _values(self, best: Best, folders: Mapping[int, Path]) -> dict[int, float]:
        """The metric by step, where a checkpoint has it."""
        found: dict[int, float] = {}
        for step, path in folders.items():
            try:
                metric = _read_manifest(path).get("metric", {})
            except CheckpointError as error:
                self._log(f"Checkpoint passed over in the choice of the best. {error}")
                continue
            if metric.get("name") == best.metric:
                found[step] = metric["value"]
        return found

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None if there is none at all.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        folders = self._folders()
        for step in sorted(folders, reverse=True):
            try:
                return open_checkpoint(folders[step])
            except CheckpointError as error:
                self._log(f"Checkpoint passed over, trying the one before it. {error}")
        if folders:
            raise CheckpointError(
                "all checkpoints are damaged",
                field=str(self._root),
                got=", ".join(folders[step].name for step in sorted(folders)),
                remedy="to start afresh set trainer.resume_mode=disable and another trainer.experiment_name",
            )
        return None

    def later_than(self, step: int) -> list[Path]:
        """Checkpoints after `step`, newest first."""
        folders = self._folders()
        return [folders[number] for number in sorted(folders, reverse=True) if number > step]

    def _folders(self) -> dict[int, Path]:
        paths = self._root.iterdir() if self._root.is_dir() else ()
        found = ((_NAME.fullmatch(path.name), path) for path in paths)
        return {int(match[1]): path for match, path in found if match is not None}

    def _prune(self, newest: int) -> None:
        """Keeps the last ones up to `newest`, and the best up to there. Later ones, which a run that went
        back to an earlier checkpoint has yet to reach, do not count."""
        if self._keep is None:
            return
        folders = {step: path for step, path in self._folders().items() if step <= newest}
        best = None if self.judge is None else self.judge.choose(self._values(self.judge, folders))
        for step in sorted(folders)[: -self._keep]:
            if step == best:
                continue
            doomed = folders[step].with_name(folders[step].name + TEMPORARY)
            folders[step].rename(doomed)  # so that a half-deleted folder is never taken for a checkpoint
            shutil.rmtree(doomed)


def open_checkpoint(path: Path) -> Checkpoint:
    """Check every file of a checkpoint against its digest and read its state. Nothing in it is run, whoever
    wrote it.

    Raises:
        CheckpointError: missing, damaged, or with a state that holds more than tensors, numpy arrays and
            plain values; says which file and how.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    for name, got in _fingerprints(path, list(manifest["files"])).items():
        expected = manifest["files"][name]
        if got != expected:
            raise CheckpointError(
                "damaged checkpoint", field=str(path / name), got=got or "missing", expected=expected
            )
    state = load_plain(path / _STATE, refused=CheckpointError, field=str(path / _STATE), remedy=_REMEDY)
    return Checkpoint(path, manifest["step"], state)


def _begin(folder: Path, writers: Mapping[str, Callable[[Path], None]]) -> None:
    for name, write in writers.items():
        (folder / name).mkdir()
        write(folder / name)


def _pickled(state: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    load_plain(buffer, refused=CheckpointError, field=_STATE, remedy=_REMEDY)  # else no resume could read it
    return buffer.getvalue()


def _write_manifest(folder: Path, step: int, more: Mapping[str, Any]) -> None:
    files = _fingerprints(folder, [str(file.relative_to(folder)) for file in files_below(folder)])
    content = {"format": _FORMAT, "step": step, **more, "files": files}
    text = json.dumps({**content, "sha256": _digest_of(content)}, indent=1)
    (folder / _MANIFEST).write_text(text, encoding="utf-8")


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    try:
        content: dict[str, Any] = parse_json(file.read_bytes())
        digest = content.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "no readable manifest",
            field=str(file),
            got=f"{type(error).__name__}: {error}",
            expected="a checkpoint folder such as …/checkpoints/step_000010",
        ) from error
    if digest != _digest_of(content):
        raise CheckpointError("damaged manifest", field=str(file), got=digest, expected=_digest_of(content))
    if content["format"] != _FORMAT:
        raise CheckpointError("another format", field=str(file), got=content["format"], expected=_FORMAT)
    return content


def _fingerprints(folder: Path, names: list[str]) -> dict[str, dict[str, Any] | None]:
    """Size and digest of each file; None for one that is not there. Hashing runs on all cores."""
    with ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(lambda name: _fingerprint(folder / name), names), strict=True))


def _fingerprint(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
