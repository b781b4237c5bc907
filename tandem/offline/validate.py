"""Check every row of data files as in training, and report all problems (`tandem data validate`)."""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from tandem.config.data import DataConfig
from tandem.config.root import TrainConfig
from tandem.config.supervised import RMConfig, SFTConfig, SupervisedDataConfig
from tandem.data.cache import number_of
from tandem.data.chat import ChatTemplate
from tandem.data.encoder import Form
from tandem.data.examples import PreferenceForm
from tandem.data.files import CHUNK_ROWS, DataFiles, read_files
from tandem.data.lines import line_numbers, scan
from tandem.data.preferences import prompt_of
from tandem.data.prompts import holds_ids
from tandem.data.sft import Columns, are_text
from tandem.data.tokens import Piece, encoded
from tandem.errors import DataError
from tandem.offline.faults import ROLE, Faults, conversation_faults, reward_faults
from tandem.rewards import own_reward
from tandem.rewards.signatures import VERLS
from tandem.trainer.supervised import rm_task, sft_task
from tandem.workers.data import prompt_form

DUPLICATE = "duplicate"
ALLOWED = (DUPLICATE, ROLE)
"""Types of problems that training accepts, so a user may allow them."""


@dataclass(frozen=True)
class Shape:
    """The columns and the form with which a command reads its rows.

    Attributes:
        columns: alternative sets of columns. The files must have all columns of one set. The prompt's column
            is first.
        optional: additional columns.
        form: returns the form of the rows of some files.
        further: yields problems of a row that training would only notice later.
    """

    columns: Sequence[tuple[str, ...]]
    optional: tuple[str, ...] | None
    form: Callable[[DataFiles], Form]
    further: Callable[[Mapping[str, Any]], Faults]


def prompts_shape(config: TrainConfig, sources: set[str]) -> Shape:
    """Return the `Shape` of rows for `tandem train`.

    Data sources in the rows are added to `sources`.
    """
    data, own = config.data, own_reward(config.custom_reward_function, config.reward.timeout)
    reads = VERLS if own is None else own.reads
    form = prompt_form(data, reads)
    scored = own is None and config.calls_functions

    def further(row: Mapping[str, Any]) -> Faults:
        yield from conversation_faults(data.prompt_key, row[data.prompt_key])
        source = form.source(row)
        if scored:
            yield from reward_faults(row, form)
        if data.mixture and source not in data.mixture:
            yield "no weight", f"{data.reward_fn_key} {source!r} has no weight in data.mixture"
        sources.add(source)

    return Shape(
        (form.required,),
        None if reads.optional is None else (*reads.optional, *form.media_keys, data.reward_fn_key),
        lambda files: replace(form, as_ids=holds_ids(files, data.prompt_key)),
        further,
    )


def sft_shape(config: SFTConfig) -> Shape:
    """Return the `Shape` of rows for `tandem sft`."""
    data = config.data
    columns = Columns(data.messages_key, data.prompt_key, data.response_key, data.text_key, data.tools_key)

    def further(row: Mapping[str, Any]) -> Faults:
        for key in (data.messages_key, data.prompt_key, *columns.responses):
            if key in row:
                yield from conversation_faults(key, row[key], ended=True)

    return Shape(columns.alternatives, columns.optional, columns.form, further)


def rm_shape(config: RMConfig) -> Shape:
    """Return the `Shape` of rows for `tandem rm`."""
    data = config.data
    answers = (data.chosen_key, data.rejected_key)
    needs = (*answers, *([] if data.margin_key is None else [data.margin_key]))

    def form(files: DataFiles) -> Form:
        prompt = prompt_of(files, data.prompt_key, needs)
        return PreferenceForm(answers, prompt, data.margin_key, are_text(files, answers))

    def further(row: Mapping[str, Any]) -> Faults:
        for key in answers:
            yield from conversation_faults(key, row[key], ended=True)
        if row[answers[0]] == row[answers[1]]:
            yield "equal answers", f"{answers[0]} and {answers[1]} are the same"

    return Shape(((data.prompt_key, *needs), needs), (), form, further)


class Report:
    """A report that prints and counts the problems of rows.

    Equal problems of neighbouring rows become one line.

    Args:
        say: prints a line.
        named: whether messages about rows include the file.
        allowed: types of problems to ignore.

    Attributes:
        kinds: a dict from type of problem to the number of problems.
        rows: the number of rows so far, of all files.
    """

    def __init__(self, say: Callable[[str], None], named: bool, allowed: Sequence[str] = ()) -> None:
        self._say, self._named, self._allowed = say, named, allowed
        self._held: tuple[int, int, str] | None = None
        self._files: list[tuple[int, Path]] = []
        self._lines: dict[Path, Sequence[int]] = {}
        self.kinds: Counter[str] = Counter()
        self.rows = 0

    def begin(self, file: str) -> None:
        """Start a file. All following rows belong to this file."""
        self._files.append((self.rows, Path(file)))

    def number(self, row: int) -> int:
        """Return the number of a row of the current file, counted over all files."""
        self.rows = max(self.rows, self._files[-1][0] + row + 1)
        return self._files[-1][0] + row

    def row(self, row: int, problem: str, kind: str | None = None) -> None:
        """Report a problem of one row. The default type is the problem's text without numbers."""
        kind = re.sub(r"(?<![-\w])\d+", "N", problem)[:80] if kind is None else kind
        if kind in self._allowed:
            return
        self.kinds[kind] += 1
        if self._held and self._held[1:] == (row - 1, problem):
            self._held = (self._held[0], row, problem)
        else:
            self.flush()
            self._held = (row, row, problem)

    def file(self, error: DataError) -> None:
        """Report a problem of a whole file."""
        self.flush()
        self.kinds[error.message] += 1
        self._say(str(error))

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Report a DataError that is raised inside the context."""
        try:
            yield
        except DataError as error:
            self.file(error)

    def flush(self) -> None:
        """Print the pending problem, which waits to be merged with equal problems of the next rows."""
        if self._held:
            first, last, problem = self._held
            self._say(f"{self.place(first)}{f' to {self.place(last)}' if last > first else ''}: {problem}")
        self._held = None

    def place(self, row: int) -> str:
        """Return a row's number in its file, from 0 as in training, and its line in a text file."""
        start, file = self._files[bisect_right(self._files, row, key=itemgetter(0)) - 1]
        if file not in self._lines:
            self._lines = {file: line_numbers(file)}  # keep those of one file only
        number, lines = row - start, self._lines[file]
        line = f" (line {lines[number]})" if number < len(lines) else ""
        return f"{f'{file.name} ' if self._named else ''}row {number}{line}"


class Prompts:
    """A check of the prompts' numbers of tokens, some rows at a time.

    Args:
        config: the config of the run, with the template's options and the length limit.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._data, self._tokenizer = config.data, tokenizer
        key = "actor_rollout_ref.model.custom_chat_template"
        self._template = ChatTemplate(tokenizer, config.data.apply_chat_template_kwargs, key)
        self._longer = self._kept = 0

    def look(self, rows: Sequence[tuple[int, Any]], form: Form, report: Report) -> None:
        """Report prompts that the chat template refuses, and prompts with zero or too many tokens.

        Raises:
            DataError: If the tokenizer has no template.
        """
        made: dict[int, list[Piece]] = {}
        for row, record in rows:
            try:
                (made[row],) = form.pieces(record, self._template)
            except TemplateError as error:
                report.row(row, f"the chat template refuses the prompt: {error}")
        ids = zip(made, encoded(self._tokenizer, list(made.values())), strict=True)
        limit, refuses = self._data.max_prompt_length, self._data.truncation == "error"
        for row, tokens in ((row, sum(map(len, parts))) for row, parts in ids):
            self._longer += tokens > limit
            self._kept += tokens <= limit
            if not tokens:
                report.row(row, "the prompt has no tokens")
            if tokens > limit and refuses and not self._data.filter_overlong_prompts:
                report.row(row, f"{tokens} tokens, above data.max_prompt_length={limit}", "over the limit")

    def require_any(self, files: Sequence[str]) -> None:
        """Check that at least one prompt is left after filtering.

        Raises:
            DataError: If all prompts are filtered out.
        """
        if self._data.filter_overlong_prompts and self._longer and not self._kept:
            raise DataError("all prompts are longer than data.max_prompt_length", field=", ".join(files))


def validate(
    config: TrainConfig | SFTConfig | RMConfig, tokenizer: PreTrainedTokenizerBase | None, report: Report
) -> None:
    """Check all rows of a config's training files.

    Args:
        config: the config.
        tokenizer: the model's tokenizer, to count tokens; None: do not count.
        report: the report, to which problems are added.
    """
    files = config.data.train_files
    if isinstance(config, TrainConfig):
        met: set[str] = set()
        prompts = None if tokenizer is None else Prompts(config, tokenizer)
        _look(config.data, prompts_shape(config, met), report, prompts)
        if missing := [source for source in config.data.mixture if source not in met]:
            report.file(
                DataError("no row has this data source", field="data.mixture", got=", ".join(missing))
            )
        return
    task = sft_task(config) if isinstance(config, SFTConfig) else rm_task(config)
    _look(config.data, sft_shape(config) if isinstance(config, SFTConfig) else rm_shape(config), report, None)
    if tokenizer is not None and not report.kinds.keys() - {DUPLICATE, ROLE}:
        with report.catching():
            task.dataset(list(files), tokenizer)


def _look(
    data: DataConfig | SupervisedDataConfig, shape: Shape, report: Report, prompts: Prompts | None
) -> None:
    files = data.train_files
    hashes, numbers = array("Q"), array("q")
    identity = list(dict.fromkeys(name for names in shape.columns for name in names))
    for file in files:
        report.begin(file)
        records = _records(file, shape, report, data.cache_dir)
        while chunk := list(islice(records, CHUNK_ROWS)):
            good = [
                (row, record) for row, record, form in chunk if _has_form(row, form.problem(record), report)
            ]
            for row, record in good:
                for kind, problem in shape.further(record):
                    report.row(row, problem, kind)
            numbers.extend(row for row, _ in good)
            told = ([record.get(name) for name in identity] for _, record in good)
            hashes.extend(number_of(json.dumps(each, default=str, sort_keys=True)) for each in told)
            if prompts is not None:
                with report.catching():
                    prompts.look(good, chunk[0][2], report)
    if prompts is not None:
        with report.catching():
            prompts.require_any(files)
    _, first, inverse = np.unique(np.array(hashes), return_index=True, return_inverse=True)
    for place in np.flatnonzero(first[inverse] != np.arange(len(numbers))).tolist():
        before = report.place(numbers[first[inverse[place]]])
        report.row(numbers[place], f"the same as {before}", DUPLICATE)
    report.flush()
    if len(files) > 1 and not report.kinds.keys() - {DUPLICATE}:
        with report.catching():  # read all files together, as training does
            read_files(files, *shape.columns, optional=shape.optional, cache_dir=data.cache_dir)


def _has_form(row: int, problem: str | None, report: Report) -> bool:
    if problem:
        report.row(row, problem)
    return not problem


def _records(
    file: str, shape: Shape, report: Report, cache_dir: str
) -> Iterator[tuple[int, dict[str, Any], Form]]:
    """Yield (row number, row, form) for each row of a file.

    If the file as a whole cannot be read, yield the rows that can be parsed line by line.
    """
    try:
        table = read_files(file, *shape.columns, optional=shape.optional, cache_dir=cache_dir)
        form = shape.form(table)
    except DataError as error:
        yield from _rescued(error, file, shape, report)
        return
    for number, record in table.records():
        yield report.number(number), record, form


def _rescued(
    error: DataError, file: str, shape: Shape, report: Report
) -> Iterator[tuple[int, dict[str, Any], Form]]:
    """Yield the valid rows of a file that training refuses with `error`, and report invalid rows."""
    path, broken, form = Path(file), False, None
    for number, record, problem in scan(path) if error.message.startswith("not a readable") else ():
        row = report.number(number)
        if problem:
            broken = True
            report.row(row, problem)
        elif record is not None:
            there = (names for names in shape.columns if set(names) <= record.keys())
            record = dict.fromkeys(next(there, shape.columns[0])) | record
            if form is None:
                form = shape.form(DataFiles(pa.Table.from_pylist([record]), (path,), (0,)))
            yield row, record, form
    if not broken:
        report.file(error)
