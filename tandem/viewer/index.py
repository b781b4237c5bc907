"""An index of all samples of a run, with numbers as columns and texts in Arrow arrays.

The index grows with the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tandem.errors import DataError
from tandem.observability.inside import inside
from tandem.observability.sample_files import NEEDED, conversation

TEXT_BYTES = 1 << 30  # bytes of responses kept in memory; responses of later files are read for each search
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, pa.ArrowException)
"""The errors that reading a damaged file raises, besides `TandemError`."""
BINS = 40  # most bins of a histogram
FILE = re.compile(r"step_\d{1,9}(_val\d*)?\.parquet")
_READ = (*NEEDED, "messages", "uid", "data_source", "finish_reason")
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Part:
    """The content of one file of samples.

    Attributes:
        path: the file.
        columns: arrays with an entry per sample: `step`, `val`, `row` (within the file), `score`, `length`
            (of the response, in tokens), and the codes `source`, `finish`, `prompt` and `uid`.
        texts: the responses; None: the responses are not kept in memory.
    """

    path: Path
    columns: Columns
    texts: pa.Array | None


class Codes:
    """A mapping of texts to numbers, in order of first appearance."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def of(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number


class SampleIndex:
    """An index of a run's samples, which reads each file once, and again when the file was rewritten.

    Args:
        run: the run folder. Its folder `samples` may not exist yet.

    Attributes:
        parts: the files that were read, sorted by name.
        damage: a dict from the name of an unreadable file to its problem.
        files: number of files of samples.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._folder = run, run / "samples"
        self.parts: list[Part] = []
        self.damage: dict[str, str] = {}
        self.files = 0
        self.codes = {name: Codes() for name in ("source", "finish", "prompt", "uid")}
        self._stamps: dict[str, tuple[int, int]] = {}  # of all files that were read, including damaged ones
        self._table: Columns | None = None
        self._bins: dict[str, tuple[list[float], np.ndarray]] = {}
        self._found: tuple[str, dict[str, np.ndarray]] = ("", {})

    def pending(self) -> list[Path]:
        """Return the files that must be read, and drop files that no longer exist."""
        self.damage.pop(self._folder.name, None)
        try:
            paths = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
            there = {path.name: path for path in paths if FILE.fullmatch(path.name) and path.is_file()}
        except OSError as error:
            self.damage[self._folder.name] = str(error)
            return []
        self.files = len(there)
        for name in self._stamps.keys() - there.keys():
            self._forget(name)
        return [path for name, path in there.items() if self._stamps.get(name) != _stamp(path)]

    def read(self, path: Path) -> None:
        """Read one file. If the file is damaged, store the problem in `damage`."""
        self._forget(path.name)
        try:
            self._stamps[path.name] = _stamp(path)
            kept = sum(part.texts.nbytes for part in self.parts if part.texts is not None)
            self.parts.append(self._part(path, keep=kept < TEXT_BYTES))
        except UNREADABLE as error:
            self.damage[path.name] = f"{type(error).__name__}: {error}"[:300]
        self.parts.sort(key=lambda each: each.path.name)

    def _forget(self, name: str) -> None:
        self.parts = [part for part in self.parts if part.path.name != name]
        self._stamps.pop(name, None)
        self.damage.pop(name, None)
        self._found[1].pop(name, None)
        self._table = None

    def _part(self, path: Path, *, keep: bool) -> Part:
        with pq.ParquetFile(inside(path, self._run)) as file:
            there = file.schema_arrow.names
            missing = [name for name in NEEDED if name not in there]
            if missing:
                raise ValueError(f"these are not samples of this version: missing {', '.join(missing)}")
            table = file.read(columns=[name for name in _READ if name in there])
        table.validate(full=True)
        for name in set(_READ) - set(there):
            table = table.append_column(name, pa.nulls(len(table), pa.string()))
        rows = np.arange(len(table), dtype=np.int32)
        uid = self._coded("uid", table["uid"])
        _, first, number = np.unique(uid if "uid" in there else rows, return_index=True, return_inverse=True)
        messages = table["messages"].take(pa.array(first)).to_pylist()
        prompts = np.array([self.codes["prompt"].of(conversation(each)) for each in messages], np.int32)
        texts = table["response_text"].cast(pa.large_string()).combine_chunks()
        columns = {
            "step": np.full(len(rows), int(path.stem.split("_")[1]), np.int32),
            "val": np.full(len(rows), "_val" in path.stem),
            "row": rows,
            "score": table["scores"].cast(pa.float32()).to_numpy(),
            "length": _lengths(table["response_mask"].combine_chunks()),
            "source": self._coded("source", table["data_source"]),
            "finish": self._coded("finish", table["finish_reason"]),
            "prompt": prompts[number],
            "uid": uid,
        }
        return Part(path, columns, texts if keep else None)

    def _coded(self, code: str, column: pa.ChunkedArray) -> np.ndarray:
        coded = column.cast(pa.string()).fill_null("").combine_chunks().dictionary_encode()
        numbers = np.array([self.codes[code].of(text) for text in coded.dictionary.to_pylist()], np.int32)
        return np.asarray(numbers[coded.indices.to_numpy(zero_copy_only=False)])

    @property
    def table(self) -> Columns:
        """Return the columns of all samples, in the order of the files. `part` is an index into `parts`."""
        if self._table is None:
            parts = [
                {**part.columns, "part": np.full(len(part.columns["row"]), number, np.int32)}
                for number, part in enumerate(self.parts)
            ]
            names = parts[0] if parts else ("step", "val", "row", "score", "length", *self.codes, "part")
            self._bins = {}
            self._table = {
                name: np.concatenate([part[name] for part in parts]) if parts else np.zeros(0, np.int32)
                for name in names
            }
        return self._table

    @property
    def indexed(self) -> int:
        """Return the number of files that were read, including damaged files."""
        return len(self.parts) + len(self.damage)

    def placed(self, name: str) -> int:
        """Return the row number in `table` of the sample with the given id.

        The id `step_000012:34` means row 34 of the file `step_000012.parquet`.

        Raises:
            DataError: the sample does not exist.
        """
        stem, _, row = name.partition(":")
        stems = [part.path.stem for part in self.parts]
        rows = np.flatnonzero(self.table["part"] == stems.index(stem)) if stem in stems else np.zeros(0, int)
        if row not in map(str, range(len(rows))):
            raise DataError("there is no such sample", field="id", got=name[:100], expected="step_000012:34")
        return int(rows[int(row)])

    def group(self, row: int) -> np.ndarray:
        """Return the row numbers in `table` of the samples in the same file with this sample's prompt."""
        part, uid = self.table["part"], self.table["uid"]
        if not self.codes["uid"].texts[uid[row]]:
            return np.array([row])
        return np.flatnonzero((part == part[row]) & (uid == uid[row]))

    def bins(self, name: str) -> tuple[list[float], np.ndarray]:
        """Return the edges of a column's histogram over all samples, and the bin of each sample.

        An extra bin at the end counts values that are not finite.
        """
        column = self.table[name]  # reading the table drops the bins of an older table
        if name not in self._bins:
            values = column.astype(np.float64)
            finite = np.isfinite(values)
            low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
            whole = column.dtype.kind == "i"
            width = math.ceil((high - low + 1) / BINS) if whole else (high - low) / BINS or 1.0
            count = math.ceil((high - low + 1) / width) if whole else BINS
            places = np.minimum((np.where(finite, values, low) - low) // width, count - 1)
            edges = [low + width * number for number in range(count + 1)]
            self._bins[name] = edges, np.where(finite, places, count).astype(np.uint8)
        return self._bins[name]

    def containing(self, text: str) -> np.ndarray:
        """Return a mask of the samples whose prompt or response contains a text, ignoring case.

        A repeated search for the same text only reads new files.
        """
        if text != self._found[0]:
            self._found = (text, {})
        known = self._found[1]
        prompts = _contain(pa.array(self.codes["prompt"].texts, pa.large_string()), text)
        for part in self.parts:
            if part.path.name not in known:
                known[part.path.name] = _contain(self.responses(part), text)
        responses = np.concatenate([np.zeros(0, bool), *(known[part.path.name] for part in self.parts)])
        return np.asarray(responses | prompts[self.table["prompt"]])

    def responses(self, part: Part) -> pa.Array:
        """Return the responses of a file."""
        if part.texts is not None:
            return part.texts
        table = pq.read_table(inside(part.path, self._run), columns=["response_text"])
        return table["response_text"].cast(pa.large_string()).combine_chunks()

    def excerpts(self, rows: np.ndarray, longest: int) -> list[str]:
        """Return the first characters of responses.

        Args:
            rows: row numbers in `table`.
            longest: the maximum number of characters per response.
        """
        parts, within = self.table["part"][rows], self.table["row"][rows]
        found = np.full(len(rows), "", object)
        for number in np.unique(parts):
            chosen = parts == number
            texts = self.responses(self.parts[number]).take(pa.array(within[chosen])).fill_null("")
            found[chosen] = pc.utf8_slice_codeunits(texts, 0, longest).to_numpy(zero_copy_only=False)
        return [str(text) for text in found]


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _lengths(mask: pa.Array) -> np.ndarray:
    """Return the number of tokens that the policy generated in each sample."""
    written = np.concatenate([[0], np.cumsum(mask.values.to_numpy(zero_copy_only=False).astype(np.int64))])
    return np.asarray(np.diff(written[mask.offsets.to_numpy()]), np.int32)


def _contain(texts: pa.Array, text: str) -> np.ndarray:
    matches = pc.match_substring(texts, text, ignore_case=True).fill_null(False)
    return np.asarray(matches.to_numpy(zero_copy_only=False))
