"""From data files to token ids, the same way for every use; of large data by several processes, and kept.
What is wrong is said of all rows at once, with their names."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import pyarrow as pa

from tandem.data.cache import digest, entry
from tandem.data.encoder import EMPTY, FAILED, SHAPE, TEMPLATE, UNLEARNT, EncodedRows, Encoder
from tandem.data.files import CHUNK_ROWS, DataFiles, read_part
from tandem.data.validate import RowProblems
from tandem.errors import DataError
from tandem.observability.progress import Progress

PART_ROWS = 8 * CHUNK_ROWS
"""Rows that a process is given at a time."""
PART_SECONDS = 600
"""After so long with them it hangs."""
_ALLOCATIONS = 1_000_000
_TOLD = ("lengths", "rows", "digests")
"""What is kept of each sequence beside its tokens."""


@dataclass(frozen=True)
class Encoded:
    """The token ids of all sequences that the limit keeps.

    Attributes:
        ids: int32, below each other.
        masks: bool, beside them, which ones the model is to write; empty where it writes none.
        lengths: (K) int64, of each sequence.
        kept: (K) int64, the numbers of their rows.
        digests: (K) uint64, of what these were made of.
    """

    ids: np.ndarray
    masks: np.ndarray
    lengths: np.ndarray
    kept: np.ndarray
    digests: np.ndarray


def encode(files: DataFiles, encoder: Encoder, *, workers: int | None, cache_dir: str | None) -> Encoded:
    """The tokens of all rows. Those of a mapped table are made by several processes, and kept.

    Args:
        workers: processes; None: as many as there are processors, if there is enough to do for them.
        cache_dir: where they are kept.

    Raises:
        DataError: rows of the wrong shape, that the template or the tokenizer refuses, without tokens, over
            the limit, or with nothing left to learn; a tokenizer without a template or end token.
    """
    if not files.arrow:
        return gather_rows(files, encoder, _parts(files, encoder, 1))
    assert cache_dir is not None, "what is mapped is kept"
    # As many processes as there are processors, each with several parts to do.
    enough = max(1, min(len(os.sched_getaffinity(0)), len(files) // (4 * PART_ROWS)))

    def keep(folder: Path) -> None:
        folder.mkdir()
        with (
            (folder / "ids").open("wb") as ids,
            (folder / "masks").open("wb") as masks,
            Progress("tokenize", len(files)) as progress,
        ):
            parts = _counted(_parts(files, encoder, workers or enough), progress)
            told = _gather(files, encoder, parts, ids, masks)
        for name, values in zip(_TOLD, told, strict=True):
            np.save(folder / f"{name}.npy", values)

    name = f"tokens-{digest(files.digest, encoder.digest)}"
    folder = entry(Path(cache_dir).expanduser(), name, f"the tokens of {files.names}", keep)
    ids, masks = _map(folder / "ids", np.int32), _map(folder / "masks", bool)
    return _within_limit(files, encoder, ids, masks, [np.load(folder / f"{each}.npy") for each in _TOLD])


def gather_rows(files: DataFiles, encoder: Encoder, parts: Iterable[EncodedRows]) -> Encoded:
    """The tokens of all rows, of their parts.

    Raises:
        DataError: see `encode`.
    """
    ids, masks = io.BytesIO(), io.BytesIO()
    told = _gather(files, encoder, parts, ids, masks)
    flat_ids, flat_masks = np.frombuffer(ids.getbuffer(), np.int32), np.frombuffer(masks.getbuffer(), bool)
    return _within_limit(files, encoder, flat_ids, flat_masks, told)


def _within_limit(
    files: DataFiles, encoder: Encoder, ids: np.ndarray, masks: np.ndarray, told: Sequence[np.ndarray]
) -> Encoded:
    """Of all sequences, of whose tokens these are those that the limit keeps."""
    lengths, rows, digests = told
    kept = encoder.limit.kept(lengths, rows, files)
    return Encoded(ids, masks, np.minimum(lengths[kept], encoder.limit.tokens), rows[kept], digests[kept])


def _map(path: Path, kind: Any) -> np.ndarray:
    return np.memmap(path, kind, mode="c") if path.stat().st_size else np.zeros(0, kind)


def _counted(parts: Iterator[EncodedRows], progress: Progress) -> Iterator[EncodedRows]:
    for part in parts:
        progress.advance(len(np.unique(part.rows)), int(part.lengths.sum()))
        yield part


def _gather(
    files: DataFiles, encoder: Encoder, parts: Iterable[EncodedRows], ids: IO[bytes], masks: IO[bytes]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Writes ids and masks; returns the lengths, rows and digests of all sequences.

    Raises:
        DataError: see `encode`; of the problems the kind that comes first.
    """
    problems = {kind: RowProblems(files.where) for kind in (SHAPE, FAILED, TEMPLATE, EMPTY, UNLEARNT)}
    told: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    reasons, formed, error = set(), 0, None
    for part in parts:
        ids.write(part.ids.data)
        masks.write(part.masks.data)
        told.append((part.lengths, part.rows, part.digests))
        for kind, found in part.problems.items():
            for row, problem in found:
                problems[kind].add(row, problem)
        reasons |= {reason for _, reason in part.problems[TEMPLATE]}
        formed, error = formed + part.formed, error or part.error
    lengths, rows, digests = map(np.concatenate, zip(*told, strict=True))
    _refuse(problems[SHAPE], SHAPE, files, encoder)
    if error is not None:
        raise error
    if len(lengths) > 1 and not formed and len(reasons) == 1:
        raise encoder.template.broken(f"{reasons.pop()}, for each of {len(lengths)} rows")
    for kind in (FAILED, TEMPLATE, EMPTY):
        _refuse(problems[kind], kind, files, encoder)
    encoder.limit.kept(lengths, rows, files)
    _refuse(problems[UNLEARNT], UNLEARNT, files, encoder)
    return lengths, rows, digests


def _refuse(found: RowProblems, kind: str, files: DataFiles, encoder: Encoder) -> None:
    mend, limit = "mend or remove these rows; rows are counted from 0", encoder.limit
    takes = "rows that the chat template and the tokenizer take"
    message, expected, remedy = {
        SHAPE: ("of the wrong shape", encoder.form.expected, mend),
        FAILED: ("that could not be turned into tokens", takes, mend),
        TEMPLATE: (
            "that the tokenizer's chat template cannot format",
            "conversations that the template accepts",
            f"mend these rows, or set another template: {encoder.template.key}=…",
        ),
        EMPTY: (
            "whose prompt has no tokens",
            "prompts of at least one token",
            "remove these rows, or check the chat template, which writes nothing for them",
        ),
        UNLEARNT: (
            "with nothing left to learn once cut to the length limit",
            f"at least one token of the response among {limit.tokens}",
            f"raise {limit.field}, or cut the other side with data.truncation",
        ),
    }[kind]
    found.raise_if_any(message, field=files.names, expected=expected, remedy=remedy)


def _parts(files: DataFiles, encoder: Encoder, workers: int) -> Iterator[EncodedRows]:
    """What all rows become, in their order."""
    starts = range(0, len(files), PART_ROWS)
    if workers == 1:
        yield from (_part(encoder, files.table.slice(start, PART_ROWS), start) for start in starts)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (encoder,))
    waiting: deque[tuple[int, Future[EncodedRows]]] = deque()
    try:
        for start in starts:
            if len(waiting) == 2 * workers:
                yield _result(files, *waiting.popleft())
            stop = min(start + PART_ROWS, len(files))
            with _without_main():
                job = pool.submit(_part_of, files.arrow, files.columns, start, stop)
            waiting.append((start, job))
        while waiting:
            yield _result(files, *waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _result(files: DataFiles, start: int, job: Future[EncodedRows]) -> EncodedRows:
    try:
        return job.result(PART_SECONDS)
    except (BrokenProcessPool, TimeoutError) as error:
        reason = f"has not answered for {PART_SECONDS} s" if isinstance(error, TimeoutError) else "died"
        raise DataError(
            f"a process that makes tokens {reason}",
            field=files.names,
            got=f"{files.where(start)} and the {PART_ROWS} rows from there",
            remedy="see what is odd about these rows, or give the processes more memory: "
            "data.filter_overlong_prompts_workers=1 takes one",
        ) from error


@contextmanager
def _without_main() -> Iterator[None]:
    """A user's script is not to run again in the processes that begin here."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_mine: list[Encoder] = []


def _begin(encoder: Encoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has one processor
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS)  # of rows hardly any are in cycles, and looking for these costs a tenth
    _mine[:] = [encoder]


def _part_of(arrow: Sequence[Path], columns: Sequence[str], start: int, stop: int) -> EncodedRows:
    return _part(_mine[0], read_part(arrow, columns, start, stop), start)


def _part(encoder: Encoder, table: pa.Table, start: int) -> EncodedRows:
    """What the rows of a table become; `start` is the number of the first."""
    chunks = (table.slice(at, CHUNK_ROWS).to_pylist() for at in range(0, len(table), CHUNK_ROWS))
    return encoder.part([row for chunk in chunks for row in chunk], range(start, start + len(table)))
