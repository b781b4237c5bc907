"""Needs of single keys, for `key(…, needs=…)`: files that exist, sizes that fit others, a device that can."""

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
"""Endings of files with functions; as in `tandem.loading`, which config does not import."""

_SPLIT = "ulysses_sequence_parallel_size"

MOST_SAMPLES = 10_000_000
"""Responses asked for at once, above which a number is a slip: one process has some hundred bytes of each."""


@dataclass(frozen=True)
class Check:
    """A need as a row: when a value is wrong, and what is said then. One that names its `field` is a rule of
    the whole config too.

    In the texts {name} stands for the path of a key, {name=} for name=value, {=name} for its value (of a
    mapping, its names). The key is one beside, or of the whole config; left out, it is the key itself.

    Attributes:
        wrong: says whether it is; given the section that holds the key, or the whole config, and the value.
        message: what is wrong; of a notice, a whole sentence.
        got, expected, remedy: as in `ConfigError`.
        field: the key, unless it is the one that declares this.
        notice: whether it is worth a sentence alone.
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
    """Every file exists; a task can be read, what it makes is for the loading."""
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
            other = f", or give hf:{file} for a data set of the hub" if named else ""
            yield ConfigError("no such file", got=file, remedy=f"check the path{other}")


def module_or_file(own: Any, name: str) -> Iterator[ConfigError]:
    """A Python file exists; the dotted name of a module is looked up when it is loaded."""
    given = getattr(own, name)
    if given is not None and (given.endswith(CODE_FILES) or os.sep in given) and not os.path.isfile(given):
        yield ConfigError("no such file", remedy="check the path")


@dataclass(frozen=True)
class ModelFolder:
    """The need of a key that names a model: a local folder, if one is named, has the file `marker`."""

    marker: str

    def __call__(self, own: Any, name: str) -> Iterator[ConfigError]:
        yield from not_a_model(getattr(own, name), self.marker)


def not_a_model(folder: str | None, marker: str, field: str | None = None) -> Iterator[ConfigError]:
    """An error if `folder`, the value at `field`, is named and has no file `marker`."""
    if not folder or os.path.isfile(os.path.join(folder, marker)):
        return
    if hub.is_name(folder):
        yield ConfigError(
            "no such folder, and as a model of the hub it cannot be had",
            field=field,
            got=f"{folder} ({hub.find(folder).problem})",
            expected=f"a Hugging Face folder with {marker}, or OWNER/NAME",
            remedy=hub.remedy(folder),
        )
        return
    yield ConfigError(
        "not a model folder" if os.path.isdir(folder) else "no such folder",
        field=field,
        got=folder,
        expected=f"a Hugging Face folder with {marker}",
        remedy="check the path, or name a model of the Hugging Face hub as OWNER/NAME",
    )


def names(own: Any, name: str) -> Iterator[ConfigError]:
    """The entries of a mapping have names that metrics and roles can have."""
    for entry in getattr(own, name):
        if not re.fullmatch(r"[A-Za-z]\w*", entry):
            yield ConfigError(
                "not a name",
                field=f"{path(own, name)}.{entry}",
                expected="letters, digits and _, a letter first",
            )


def own_code(own: Any, name: str) -> Iterator[ConfigError]:
    """The file of a user's own function exists, or of several; what is in it is for the loading."""
    given = getattr(own, name)
    for reference in (given,) if isinstance(given, str) else given or ():
        yield from code_file(path(own, name), reference)


def code_file(field: str, reference: str) -> Iterator[ConfigError]:
    """An error if `reference`, the value at `field`, is a name in a Python file that is not there."""
    file, colon, _ = reference.rpartition(":")
    if colon and file.endswith(CODE_FILES) and not os.path.isfile(file):
        yield ConfigError("no such file", field=field, got=file, remedy="check the path before the colon")


within_response = Check(
    lambda own, least: least > root(own).data.max_response_length,
    "longer than the longest response",
    expected="at most {data.max_response_length=}",
    remedy="set {}={=data.max_response_length} or less, or raise data.max_response_length",
)
"""No more tokens than a response may have."""


def holds_longest(own: Any, name: str) -> Iterator[ConfigError]:
    """A token budget holds one sequence of the greatest length, or a device's part of it."""
    data, field = root(own).data, path(own, name)
    longest = sum(getattr(data, length) for length in data.lengths)
    names = " + ".join(path(data, length) for length in data.lengths)
    section = own if hasattr(own, _SPLIT) else root(own).actor_rollout_ref.actor
    least = -(-longest // getattr(section, _SPLIT))
    if least < longest:
        names = f"({names}) / {path(section, _SPLIT)}"
    if getattr(own, name) < least:
        yield ConfigError(
            "holds less than one sequence of the greatest length",
            expected=f"at least {least} tokens ({names})",
            remedy=f"set {field}={least}, or shorten the sequences",
        )


def divides_batch(own: Any, name: str) -> Iterator[ConfigError]:
    """A mini-batch is a whole part of the batch."""
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
            remedy=f"the nearest is {field}={near}",
        )


def countable(number: int, prompts: int, of: str, prompts_key: str) -> Iterator[ConfigError]:
    """So many responses per prompt can be held. The greater of the two numbers is named.

    Args:
        number: the responses to each prompt.
        prompts: how many are answered at once.
        of: these, in words.
        prompts_key: the key that says how many.
    """
    if number * prompts <= MOST_SAMPLES:
        return
    of_prompts = prompts > number
    other, beside = (number, "a prompt") if of_prompts else (prompts, of)
    yield ConfigError(
        f"asks for {number * prompts:,} responses at once",
        field=prompts_key if of_prompts else None,
        got=prompts if of_prompts else number,
        expected=f"at most {MOST_SAMPLES // other:,}: {MOST_SAMPLES:,} responses, {other:,} {beside}",
        remedy=f"lower it, or the number of {'responses to a prompt' if of_prompts else of}",
    )


validation_files = Check(
    lambda own, asked: asked > 0 and not root(own).data.val_files,
    "asks for validation, and there are no validation files",
    remedy="set data.val_files, or remove this key",
)
"""A validation that is asked for has files."""


def no_greedy_repeats(is_greedy: Callable[[Any], bool]) -> Check:
    """Return the notice of several responses to a prompt that are all the same."""
    return Check(
        lambda own, n: n > 1 and is_greedy(own),
        "{}={=}: greedy responses to one prompt are all the same; one would do.",
        notice=True,
    )
