"""Rules about the value of a single key, for `key(…, needs=…)`.

For example: files that exist, sizes that fit other sizes, a device that supports the setting.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from typing import Any

from tandem import hub
from tandem.config.data_files import files_of
from tandem.config.section import Finding
from tandem.config.view import path, root
from tandem.errors import ConfigError, DataError
from tandem.tasks import is_task, parse

CODE_FILES = (".py", ".pkl")
"""Suffixes of files with functions. `tandem.loading` has the same list, but config does not import it."""

_SPLIT = "ulysses_sequence_parallel_size"

MOST_SAMPLES = 10_000_000
"""The largest accepted number of responses in one step. A larger number must be a mistake.

The controller needs some hundred bytes for each response.
"""


@dataclass(frozen=True)
class Check:
    """A rule about a value: a function that detects a wrong value, and the texts of the message.

    If `field` is set, the rule can also check the whole config.

    In the texts, {name} is replaced by the path of the key `name`, {name=} by path=value, and {=name} by the
    value alone (for a mapping, by its keys). `name` is a key of the same section, or a dotted path of the
    whole config. If `name` is empty, it is the key that the rule checks.

    Attributes:
        wrong: returns whether the value is wrong, given the section with the key (or the whole config) and
            the value.
        message: the problem; for a notice, a whole sentence.
        got: the given value, for the `ConfigError`.
        expected: the valid values, for the `ConfigError`.
        remedy: what to do, for the `ConfigError`.
        field: the key of the error, if another key than the checked key.
        notice: whether the rule gives a notice instead of an error.
    """

    wrong: Callable[[Any, Any], Any]
    message: str
    got: str | None = None
    expected: str | None = None
    remedy: str | None = None
    field: str = ""
    notice: bool = False

    def __call__(self, own: Any, name: str = "") -> Iterator[Finding]:
        key = self.field or name
        if not self.wrong(own, attrgetter(key)(own)):
            return
        given = (self.message, self.got, self.expected, self.remedy)
        message, got, expected, remedy = (text and _filled(text, own, key) for text in given)
        if self.notice:
            yield str(message)
        else:
            yield ConfigError(str(message), field=path(own, key), got=got, expected=expected, remedy=remedy)


_KEY = re.compile(r"\{(=?)([\w.]*)(=?)\}")


def _filled(text: str, own: Any, key: str) -> str:
    def filled(found: re.Match[str]) -> str:
        alone, name, beside = found.groups()
        name = name or key
        holder = own if name.partition(".")[0] in type(own).model_fields else root(own)
        value = attrgetter(name)(holder) if alone or beside else ""
        value = ", ".join(value) if isinstance(value, dict) else str(value)
        value = value.lower() if value in ("True", "False") else value
        return value if alone else path(holder, name) + beside + value

    return _KEY.sub(filled, text)


def files(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that every data file exists, and that the name of each generated task can be parsed.

    The rows that a task generates are checked when the data is loaded.
    """
    for file in getattr(own, name) or ():
        if is_task(file):
            try:
                parse(file)
            except DataError as error:
                yield ConfigError(error.message, got=error.got, expected=error.expected, remedy=error.remedy)
        elif not os.path.isfile(file):
            try:
                if files_of(file) != [file]:
                    continue
            except ConfigError as error:
                yield error
                continue
            named = hub.is_name(file) and not file.endswith(hub.DATA_SUFFIXES)
            other = f", or use hf:{file} for a dataset of the Hugging Face hub" if named else ""
            yield ConfigError("this file does not exist", got=file, remedy=f"check the path{other}")


def module_or_file(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that a Python file exists. The dotted name of a module is not checked."""
    given = getattr(own, name)
    if given is not None and (given.endswith(CODE_FILES) or os.sep in given) and not os.path.isfile(given):
        yield ConfigError("this file does not exist", remedy="check the path")


@dataclass(frozen=True)
class ModelFolder:
    """The rule for a key that names a model: if it is a local folder, it must contain the file `marker`."""

    marker: str

    def __call__(self, own: Any, name: str) -> Iterator[ConfigError]:
        yield from not_a_model(getattr(own, name), self.marker)


def not_a_model(folder: str | None, marker: str, field: str | None = None) -> Iterator[ConfigError]:
    """Yield an error if `folder`, the value of `field`, is set but has no file `marker`."""
    if not folder or os.path.isfile(os.path.join(folder, marker)):
        return
    if hub.is_name(folder):
        yield ConfigError(
            "this folder does not exist, and the hub has no model of that name that can be downloaded here",
            field=field,
            got=f"{folder} ({hub.find(folder).problem})",
            expected=f"a Hugging Face folder with {marker}, or OWNER/NAME of a model on the hub",
            remedy=hub.remedy(folder),
        )
        return
    yield ConfigError(
        f"this folder has no {marker}" if os.path.isdir(folder) else "this folder does not exist",
        field=field,
        got=folder,
        expected=f"a Hugging Face folder with {marker}",
        remedy="check the path, or use OWNER/NAME for a model of the Hugging Face hub",
    )


def names(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that the entries of a mapping have names that are valid in metrics and roles."""
    for entry in getattr(own, name):
        if not re.fullmatch(r"[A-Za-z]\w*", entry):
            yield ConfigError(
                "this is not a valid name",
                field=f"{path(own, name)}.{entry}",
                expected="letters, digits and _, starting with a letter",
            )


def own_code(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that the files of user-defined functions exist.

    Their content is only read when the function is loaded.
    """
    given = getattr(own, name)
    for reference in (given,) if isinstance(given, str) else given or ():
        yield from code_file(path(own, name), reference)


def code_file(field: str, reference: str) -> Iterator[ConfigError]:
    """Yield an error if `reference`, the value of `field`, is FILE.py:NAME and the file does not exist."""
    file, colon, _ = reference.rpartition(":")
    if colon and file.endswith(CODE_FILES) and not os.path.isfile(file):
        yield ConfigError(
            "this file does not exist", field=field, got=file, remedy="check the path before the colon"
        )


within_response = Check(
    lambda own, least: least > root(own).data.max_response_length,
    "longer than the longest response",
    expected="at most {data.max_response_length=}",
    remedy="set {}={=data.max_response_length} or less, or raise data.max_response_length",
)
"""The rule that a number of tokens is not larger than the longest response."""


def holds_longest(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that a token limit is large enough for one device's part of the longest sequence."""
    data, field = root(own).data, path(own, name)
    longest = sum(getattr(data, length) for length in data.lengths)
    names = " + ".join(path(data, length) for length in data.lengths)
    section = own if hasattr(own, _SPLIT) else root(own).actor_rollout_ref.actor
    least = -(-longest // getattr(section, _SPLIT))
    if least < longest:
        names = f"({names}) / {path(section, _SPLIT)}"
    if getattr(own, name) < least:
        yield ConfigError(
            "too small for the longest sequence",
            expected=f"at least {least} tokens ({names})",
            remedy=f"set {field}={least}, or lower the maximum lengths",
        )


def divides_batch(own: Any, name: str) -> Iterator[ConfigError]:
    """Check that the batch is a multiple of the mini-batch."""
    mini, whole, field = getattr(own, name), root(own).data.train_batch_size, path(own, name)
    if mini > whole:
        yield ConfigError(
            "larger than data.train_batch_size",
            expected=f"at most {whole}, and a divisor of it",
            remedy=f"set {field}={whole}, or raise data.train_batch_size",
        )
    elif whole % mini:
        near = reduce(
            lambda best, d: d if whole % d == 0 and abs(d - mini) < abs(best - mini) else best,
            range(1, min(whole, 2 * mini) + 1),
        )
        yield ConfigError(
            "does not divide data.train_batch_size",
            expected=f"a divisor of {whole}",
            remedy=f"set {field}={near}, the nearest divisor",
        )


def countable(number: int, prompts: int, of: str, prompts_key: str) -> Iterator[ConfigError]:
    """Check that `number` · `prompts` responses fit into memory. The error names the larger factor.

    Args:
        number: responses per prompt.
        prompts: prompts that are answered at the same time.
        of: a description of these prompts.
        prompts_key: the key that sets their number.
    """
    if number * prompts <= MOST_SAMPLES:
        return
    of_prompts = prompts > number
    other, beside = (number, "a prompt") if of_prompts else (prompts, of)
    yield ConfigError(
        f"this requests {number * prompts:,} responses at once",
        field=prompts_key if of_prompts else None,
        got=prompts if of_prompts else number,
        expected=f"at most {MOST_SAMPLES // other:,}: {MOST_SAMPLES:,} responses, {other:,} {beside}",
        remedy=f"lower it, or the number of {'responses to a prompt' if of_prompts else of}",
    )


validation_files = Check(
    lambda own, asked: asked > 0 and not root(own).data.val_files,
    "this requests validation, but there are no validation files",
    remedy="set data.val_files, or remove this key",
)
"""The rule that a requested validation needs validation files."""


def no_greedy_repeats(is_greedy: Callable[[Any], bool]) -> Check:
    """Return the notice that several greedy responses to one prompt are identical."""
    return Check(
        lambda own, n: n > 1 and is_greedy(own),
        "{}={=}: greedy responses to one prompt are all identical, so one is enough.",
        notice=True,
    )
