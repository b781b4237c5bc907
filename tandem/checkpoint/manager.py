"""Save and load checkpoints of a run: one folder per step, written atomically and verified by digests.

checkpoints/step_000010/manifest.json   step, metric for the choice of the best, size and sha256 of every file
                        state.pt        small state: counters, data position, controllers
                        NAME/…          files of the writer of that name: model shards, optimizer
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
_REMEDY = (
    "return only plain values, tensors and numpy arrays from a state_dict() of yours, such as a sampler's"
)
NO_METRICS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete, verified checkpoint.

    Attributes:
        path: the checkpoint's folder; each writer's files are in the subfolder with the writer's name.
        step: number of finished training steps.
        state: the state that was given to `save`.
    """

    path: Path
    step: int
    state: dict[str, Any]


class CheckpointManager:
    """The manager of the checkpoints in a folder. Only one process may write checkpoints to the folder.

    Unless `read_only` is set, the constructor cleans up after a killed process. It removes folders that were
    being written or deleted, and completes interrupted replacements.

    Args:
        root: the folder of the checkpoints; created if it does not exist.
        keep: how many of the newest checkpoints to keep; None keeps all.
        best: the rule for the best checkpoint, which is kept in addition; None keeps no additional
            checkpoint.
        log: called with one sentence about each damaged checkpoint that is skipped.
        read_only: do not change the folder, because another process may be saving a checkpoint.

    Attributes:
        judge: the rule for the best checkpoint, or None.

    Raises:
        ConfigError: `keep` is below 1.
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
        """Write a checkpoint and delete old checkpoints; replace an existing checkpoint of the same step.

        Args:
            step: number of finished training steps.
            writers: a dict from name to a function. The function gets an empty folder and writes files there.
            state: small state: plain values, tensors and numpy arrays.
            metrics: metrics of the step. One of them decides which checkpoint is the best.

        Raises:
            CheckpointError: the disk is full or cannot be written, or the state has objects of unsupported
                types. All files of this checkpoint are removed, and all earlier checkpoints are intact.
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
        """Start a checkpoint that is written while training continues.

        This returns as soon as all writers have started.

        Args:
            step: number of finished training steps.
            starters: a dict from name to a function that starts to write files to an empty folder, its
                argument. When the folder is complete, the writer must create its `written_mark`.
            state: small state, see `save`; the current values are stored.
            metrics: metrics of the step.

        Raises:
            CheckpointError: the errors of `save` that occur at the start; `PendingSave.check` raises later
                errors.
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
        """Write the manifest and the state of a checkpoint."""
        (folder / _STATE).write_bytes(state)
        judged = {}
        if self.judge is not None and (value := self.judge.value(metrics)) is not None:
            judged = {"metric": {"name": self.judge.metric, "value": value}}
        _write_manifest(folder, step, judged)

    def best(self, best: Best) -> Checkpoint | None:
        """Return the best checkpoint, among all checkpoints that were saved with the rule's metric.

        Return None if there is no such checkpoint.

        Raises:
            CheckpointError: the best checkpoint is damaged.
        """
        step = best.choose(self._values(best, self._folders()))
        return None if step is None else open_checkpoint(self._path(step))

    def _values(self, best: Best, folders: Mapping[int, Path]) -> dict[int, float]:
        """Return a dict from step to the rule's metric, for all checkpoints that have the metric."""
        found: dict[int, float] = {}
        for step, path in folders.items():
            try:
                metric = _read_manifest(path).get("metric", {})
            except CheckpointError as error:
                self._log(f"Checkpoint skipped in the choice of the best. {error}")
                continue
            if metric.get("name") == best.metric:
                found[step] = metric["value"]
        return found

    def latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint; None if there are no checkpoints.

        Raises:
            CheckpointError: there are checkpoints, but all of them are damaged.
        """
        folders = self._folders()
        for step in sorted(folders, reverse=True):
            try:
                return open_checkpoint(folders[step])
            except CheckpointError as error:
                self._log(f"Checkpoint skipped, trying the previous one. {error}")
        if folders:
            raise CheckpointError(
                "all checkpoints are damaged",
                field=str(self._root),
                got=", ".join(folders[step].name for step in sorted(folders)),
                remedy="to start over, set trainer.resume_mode=disable and another trainer.experiment_name",
            )
        return None

    def later_than(self, step: int) -> list[Path]:
        """Return the folders of checkpoints after `step`, newest first."""
        folders = self._folders()
        return [folders[number] for number in sorted(folders, reverse=True) if number > step]

    def _folders(self) -> dict[int, Path]:
        paths = self._root.iterdir() if self._root.is_dir() else ()
        found = ((_NAME.fullmatch(path.name), path) for path in paths)
        return {int(match[1]): path for match, path in found if match is not None}

    def _prune(self, newest: int) -> None:
        """Delete old checkpoints up to `newest`, except the last `keep` checkpoints and the best checkpoint.

        Checkpoints after `newest` are ignored. They exist if a run went back to an earlier checkpoint and has
        not reached their steps again.
        """
        if self._keep is None:
            return
        folders = {step: path for step, path in self._folders().items() if step <= newest}
        best = None if self.judge is None else self.judge.choose(self._values(self.judge, folders))
        for step in sorted(folders)[: -self._keep]:
            if step == best:
                continue
            doomed = folders[step].with_name(folders[step].name + TEMPORARY)
            folders[step].rename(doomed)  # so that a half-deleted folder never looks like a checkpoint
            shutil.rmtree(doomed)


def open_checkpoint(path: Path) -> Checkpoint:
    """Check every file of a checkpoint against its digest and read the state.

    Code in the files is never run, so checkpoints from unknown sources are safe to open.

    Raises:
        CheckpointError: a file is missing or damaged, or the state has objects other than tensors, numpy
            arrays and plain values. The message names the file and the problem.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    for name, got in _fingerprints(path, list(manifest["files"])).items():
        expected = manifest["files"][name]
        if got != expected:
            raise CheckpointError(
                "damaged checkpoint", field=str(path / name), got=got or "missing file", expected=expected
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
    load_plain(buffer, refused=CheckpointError, field=_STATE, remedy=_REMEDY)  # fails if it cannot be read
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
            "the manifest is missing or cannot be read",
            field=str(file),
            got=f"{type(error).__name__}: {error}",
            expected="a checkpoint folder such as …/checkpoints/step_000010",
            remedy="name a folder under RUN/checkpoints; if its manifest is damaged, name an earlier one",
        ) from error
    if digest != _digest_of(content):
        raise CheckpointError("damaged manifest", field=str(file), got=digest, expected=_digest_of(content))
    if content["format"] != _FORMAT:
        raise CheckpointError("unknown format", field=str(file), got=content["format"], expected=_FORMAT)
    return content


def _fingerprints(folder: Path, names: list[str]) -> dict[str, dict[str, Any] | None]:
    """Return size and digest of each file, or None for a missing file; hashing uses all cores."""
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
