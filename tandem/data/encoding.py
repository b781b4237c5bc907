"""Convert the rows of data files to token ids, in parallel processes and with a cache.

Problems are collected over all rows and reported together, with the names of the rows.
"""

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
"""The number of rows that a process gets at a time."""
PART_SECONDS = 600
"""The time limit, in seconds, for one part. A process that needs longer is considered hung."""
_ALLOCATIONS = 1_000_000
_PER_SEQUENCE = ("lengths", "rows", "digests")
"""The arrays with one value per sequence, which are stored in addition to the tokens."""


@dataclass(frozen=True)
class Encoded:
    """The token ids of all sequences that the limit keeps.

    Attributes:
        ids: int32 token ids of all sequences, concatenated.
        masks: bool, for each token whether the model is trained to write it. Empty if the data are prompts.
        lengths: (K) int64, the length of each sequence.
        kept: (K) int64, the row number of each sequence.
        digests: (K) uint64, a digest of the row of each sequence.
    """

    ids: np.ndarray
    masks: np.ndarray
    lengths: np.ndarray
    kept: np.ndarray
    digests: np.ndarray


def encode(files: DataFiles, encoder: Encoder, *, workers: int | None, cache_dir: str | None) -> Encoded:
    """Return the tokens of all rows.

    If the table is mapped from Arrow files, several processes tokenize it and the cache keeps the result.

    Args:
        files: The rows.
        encoder: The converter from rows to tokens.
        workers: The number of processes; None: one per CPU core, or fewer if there are few rows.
        cache_dir: The cache folder.

    Raises:
        DataError: Rows are invalid, are rejected by the template or the tokenizer, have no tokens, exceed the
            limit, or have no tokens to train on; or the tokenizer has no template or end token.
    """
    if not files.arrow:
        return gather_rows(files, encoder, _parts(files, encoder, 1))
    assert cache_dir is not None, "a mapped table needs a cache folder"
    # One process per CPU core, but only as many as have several parts each.
    enough = max(1, min(len(os.sched_getaffinity(0)), len(files) // (4 * PART_ROWS)))

    def keep(folder: Path) -> None:
        folder.mkdir()
        with (
            (folder / "ids").open("wb") as ids,
            (folder / "masks").open("wb") as masks,
            Progress("tokenize", len(files)) as progress,
        ):
            parts = _counted(_parts(files, encoder, workers or enough), progress)
            per_sequence = _gather(files, encoder, parts, ids, masks)
        for name, values in zip(_PER_SEQUENCE, per_sequence, strict=True):
            np.save(folder / f"{name}.npy", values)

    name = f"tokens-{digest(files.digest, encoder.digest)}"
    folder = entry(Path(cache_dir).expanduser(), name, f"the tokens of {files.names}", keep)
    ids, masks = _map(folder / "ids", np.int32), _map(folder / "masks", bool)
    return _within_limit(
        files, encoder, ids, masks, [np.load(folder / f"{each}.npy") for each in _PER_SEQUENCE]
    )


def gather_rows(files: DataFiles, encoder: Encoder, parts: Iterable[EncodedRows]) -> Encoded:
    """Return the tokens of all rows from their encoded parts.

    Args:
        files: The rows, for messages.
        encoder: The converter that made the parts.
        parts: The encoded parts, in the order of the rows.

    Raises:
        DataError: See `encode`.
    """
    ids, masks = io.BytesIO(), io.BytesIO()
    per_sequence = _gather(files, encoder, parts, ids, masks)
    flat_ids, flat_masks = np.frombuffer(ids.getbuffer(), np.int32), np.frombuffer(masks.getbuffer(), bool)
    return _within_limit(files, encoder, flat_ids, flat_masks, per_sequence)


def _within_limit(
    files: DataFiles, encoder: Encoder, ids: np.ndarray, masks: np.ndarray, per_sequence: Sequence[np.ndarray]
) -> Encoded:
    """Return the sequences that the length limit keeps.

    `ids` and `masks` already contain only the tokens of these sequences. `per_sequence` describes all
    sequences.
    """
    lengths, rows, digests = per_sequence
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
    """Write ids and masks, and return the lengths, rows and digests of all sequences.

    Raises:
        DataError: See `encode`. If there are problems of several kinds, the error reports the first kind.
    """
    problems = {kind: RowProblems(files.where) for kind in (SHAPE, FAILED, TEMPLATE, EMPTY, UNLEARNT)}
    per_sequence: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    reasons, formed, error = set(), 0, None
    for part in parts:
        ids.write(part.ids.data)
        masks.write(part.masks.data)
        per_sequence.append((part.lengths, part.rows, part.digests))
        for kind, found in part.problems.items():
            for row, problem in found:
                problems[kind].add(row, problem)
        reasons |= {reason for _, reason in part.problems[TEMPLATE]}
        formed, error = formed + part.formed, error or part.error
    lengths, rows, digests = map(np.concatenate, zip(*per_sequence, strict=True))
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
    fix, limit = "fix or remove these rows; rows are counted from 0", encoder.limit
    takes = "rows that the chat template and the tokenizer accept"
    message, expected, remedy = {
        SHAPE: ("of the wrong shape", encoder.form.expected, fix),
        FAILED: ("that could not be turned into tokens", takes, fix),
        TEMPLATE: (
            "that the tokenizer's chat template cannot format",
            "conversations that the template accepts",
            f"fix these rows, or set another template: {encoder.template.key}=…",
        ),
        EMPTY: (
            "whose prompt has no tokens",
            "prompts of at least one token",
            "remove these rows, or check the chat template: its text for them is empty",
        ),
        UNLEARNT: (
            "without any token to train on after the cut to the length limit",
            f"at least one token of the response among {limit.tokens}",
            f"raise {limit.field}, or cut the other side with data.truncation",
        ),
    }[kind]
    found.raise_if_any(message, field=files.names, expected=expected, remedy=remedy)


def _parts(files: DataFiles, encoder: Encoder, workers: int) -> Iterator[EncodedRows]:
    """Yield the encoded parts of all rows, in the order of the rows."""
    starts = range(0, len(files), PART_ROWS)
    if workers == 1:
        yield from (_part(encoder, files.table.slice(start, PART_ROWS), start) for start in starts)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_process, (encoder,))
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
            f"a tokenizing process {reason}",
            field=files.names,
            got=f"the {PART_ROWS} rows from {files.where(start)} on",
            remedy="look for unusual rows there, or give each process more memory: "
            "data.filter_overlong_prompts_workers=1 starts only one",
        ) from error


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module, so that new processes do not run the user's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_process_encoder: list[Encoder] = []


def _start_process(encoder: Encoder) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process uses one CPU core
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS)  # rows hardly form reference cycles; looking for them costs 10 %
    _process_encoder[:] = [encoder]


def _part_of(arrow: Sequence[Path], columns: Sequence[str], start: int, stop: int) -> EncodedRows:
    return _part(_process_encoder[0], read_part(arrow, columns, start, stop), start)


def _part(encoder: Encoder, table: pa.Table, start: int) -> EncodedRows:
    """Encode the rows of a table; `start` is the number of the first row."""
    chunks = (table.slice(at, CHUNK_ROWS).to_pylist() for at in range(0, len(table), CHUNK_ROWS))
    return encoder.part([row for chunk in chunks for row in chunk], range(start, start + len(table)))
