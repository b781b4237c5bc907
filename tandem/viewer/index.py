"""An index of all samples of a run, which grows with it: numbers as columns, texts as Arrow holds them."""

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

TEXT_BYTES = 1 << 30  # of responses kept in memory. Those of later files are read again for each search
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, pa.ArrowException)
"""What reading a damaged file raises, beside a `TandemError`."""
BINS = 40  # of a histogram
FILE = re.compile(r"step_\d{1,9}(_val\d*)?\.parquet")
_READ = (*NEEDED, "messages", "uid", "data_source", "finish_reason")
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Part:
    """One file of samples, read.

    Attributes:
        path: the file.
        columns: an entry for each sample: `step`, `val`, `row` (within the file), `score`, `length` (of the
            response, tokens), and `source`, `finish`, `prompt`, `uid` as codes.
        texts: the responses; None: they are not kept.
    """

    path: Path
    columns: Columns
    texts: pa.Array | None


class Codes:
    """Texts and their numbers, in order of first appearance."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def of(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number


class SampleIndex:
    """Reads each file of samples once, and again when it was written anew.

    Args:
        run: the run folder; its `samples` may come later.

    Attributes:
        parts: the files read, in the order of their names.
        damage: what is wrong with those that cannot be read, by the file's name.
        files: how many there are.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._folder = run, run / "samples"
        self.parts: list[Part] = []
        self.damage: dict[str, str] = {}
        self.files = 0
        self.codes = {name: Codes() for name in ("source", "finish", "prompt", "uid")}
        self._stamps: dict[str, tuple[int, int]] = {}  # of all files looked at, damaged ones too
        self._table: Columns | None = None
        self._bins: dict[str, tuple[list[float], np.ndarray]] = {}
        self._found: tuple[str, dict[str, np.ndarray]] = ("", {})

    def pending(self) -> list[Path]:
        """The files that are to be read; those that are gone are forgotten."""
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
        """Takes in one file; says in `damage` what is wrong with it."""
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
                raise ValueError(f"no samples of this version: the file has no {', '.join(missing)}")
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
        """All samples, in the order of the files; `part` is the number among `parts`."""
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
        """How many files were read, damaged ones too."""
        return len(self.parts) + len(self.damage)

    def placed(self, name: str) -> int:
        """Return the number within `table` of a sample, by its id: `step_000012:34` is row 34 of a file.

        Raises:
            DataError: there is no such sample.
        """
        stem, _, row = name.partition(":")
        stems = [part.path.stem for part in self.parts]
        rows = np.flatnonzero(self.table["part"] == stems.index(stem)) if stem in stems else np.zeros(0, int)
        if row not in map(str, range(len(rows))):
            raise DataError("no such sample", field="id", got=name[:100], expected="step_000012:34")
        return int(rows[int(row)])

    def group(self, row: int) -> np.ndarray:
        """Return the numbers within `table` of the samples of one file that share a prompt with this one."""
        part, uid = self.table["part"], self.table["uid"]
        if not self.codes["uid"].texts[uid[row]]:
            return np.array([row])
        return np.flatnonzero((part == part[row]) & (uid == uid[row]))

    def bins(self, name: str) -> tuple[list[float], np.ndarray]:
        """The edges of a histogram of a column over all samples, and for each sample its bin; one more, the
        last, is for what is not finite."""
        column = self.table[name]  # the bins of an earlier table go with it
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
        """Which samples have a text in their prompt or response, upper case and lower case alike. Of the last
        text asked for, only files that are new are searched."""
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
        """The responses of a file."""
        if part.texts is not None:
            return part.texts
        table = pq.read_table(inside(part.path, self._run), columns=["response_text"])
        return table["response_text"].cast(pa.large_string()).combine_chunks()

    def excerpts(self, rows: np.ndarray, longest: int) -> list[str]:
        """The first characters of responses.

        Args:
            rows: numbers within `table`.
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
    """Return how many tokens of each sample the policy wrote."""
    written = np.concatenate([[0], np.cumsum(mask.values.to_numpy(zero_copy_only=False).astype(np.int64))])
    return np.asarray(np.diff(written[mask.offsets.to_numpy()]), np.int32)


def _contain(texts: pa.Array, text: str) -> np.ndarray:
    matches = pc.match_substring(texts, text, ignore_case=True).fill_null(False)
    return np.asarray(matches.to_numpy(zero_copy_only=False))
