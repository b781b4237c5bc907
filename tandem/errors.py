"""The exceptions of Tandem, all of which can be pickled.

A message has the problem, the given value, the expected value and a remedy. These parts are also attributes,
which programs can read.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.hidden import masked


class TandemError(Exception):
    """An error that the user can act on.

    Args:
        message: the problem, in one sentence.
        field: the config key, column, file or argument.
        got: the given value.
        expected: a description of valid values.
        remedy: the action that solves the problem.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        got: Any = None,
        expected: Any = None,
        remedy: str | None = None,
    ) -> None:
        self.message = message
        self.field = field
        self.got = got
        self.expected = expected
        self.remedy = remedy
        super().__init__(message)

    def __str__(self) -> str:
        lines = [self.message if self.field is None else f"{self.field}: {self.message}"]
        if self.got is not None:
            lines.append(f"  got:      {self.got}")
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        if self.remedy is not None:
            lines.append(f"  remedy:   {self.remedy}")
        return masked("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.__dict__)


def _rebuild(cls: type[TandemError], message: str, state: dict[str, Any]) -> TandemError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigError(TandemError, ValueError):
    """The config or a command line has an invalid or unknown setting."""


class ConfigErrors(ConfigError):
    """All errors of a config, reported together.

    Args:
        errors: the errors, in the order of the config's fields.
        readings: the translations of the keys of another program's command line, except keys with errors.
    """

    def __init__(self, errors: list[ConfigError], readings: Sequence[Any] = ()) -> None:
        self.errors = errors
        self.readings = tuple(readings)
        super().__init__(f"{len(errors)} error(s) in the config")

    def __str__(self) -> str:
        return "\n".join([self.message, *(str(error) for error in self.errors)])


class DataError(TandemError, ValueError):
    """A data file, one of its rows, or a batch has the wrong shape or content."""


class NoTokensError(DataError):
    """No token of a mini-batch counts for the loss, so the mini-batch has no gradient."""


class FileError(TandemError, OSError):
    """A file or a folder cannot be read or written, or a connection failed."""

    @classmethod
    def of(cls, error: OSError, path: Path | str | None = None) -> FileError:
        """Convert an error of the operating system to a `FileError` for its file.

        Args:
            error: the error.
            path: the file, if the error does not name it.
        """
        if isinstance(error, cls):
            return error
        name = path if error.filename is None else error.filename
        found = cls(
            "cannot be read or written" if name else "the operating system refused an operation",
            field=None if name is None else str(name),
            got=error.strerror or str(error) or type(error).__name__,
            remedy=_REMEDIES.get(error.errno or 0),
        )
        found.errno = error.errno
        return found


_FULL = "free space there, or write elsewhere; the same command continues a run from its last checkpoint"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.ENOENT: "check the path; paths are relative to the working folder",
    errno.EISDIR: "give a file; this is a folder",
    errno.ENOTDIR: "give a folder; this path, or a part of it, is a file",
    errno.EEXIST: "choose another path; this one exists",
    errno.EACCES: "choose another path, or change its permissions",
    errno.EROFS: "write elsewhere; this file system is read-only",
}


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Convert operating system errors inside the block to `FileError`s for the file."""
    try:
        yield
    except OSError as error:
        raise FileError.of(error, path) from error


class ModelError(TandemError, ValueError):
    """A model or tokenizer folder cannot be used."""


class IncompleteModelError(ModelError):
    """Files of a model folder are missing or cut off; another machine may have them."""


class RewardError(TandemError, ValueError):
    """A reward function raised an exception, or did not return a finite score."""


class CheckpointError(TandemError, RuntimeError):
    """A checkpoint is damaged, missing, or does not fit this run."""


class EngineError(TandemError, RuntimeError):
    """An engine does not support a request, or a request failed."""


class DeviceMemoryError(EngineError):
    """A device did not have enough memory for a pass of a model.

    Args:
        message: the problem, in one sentence.
        use: the result of `tandem.device.memory_use` at the time of the error.
        options: other arguments of `TandemError`.

    Attributes:
        role: the model's role, set by its worker.
        training: whether the model was being trained, set by its worker.
        held: a dict from purpose to bytes, set by the worker; empty without measurements.
    """

    def __init__(self, message: str, *, use: Mapping[str, int], **options: Any) -> None:
        super().__init__(message, **options)
        self.use = dict(use)
        self.role, self.training = "", False
        self.held: dict[str, float] = {}


class NonFiniteError(TandemError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class WorkerFailure(TandemError, RuntimeError):
    """A worker raised an error, died or stopped answering. The message is the whole report.

    Args:
        message: the worker, its method, and the activity of all other workers.
        restartable: whether a restart of the same run may help: true, unless the user has to act on the
            cause.
    """

    def __init__(self, message: str, *, restartable: bool) -> None:
        super().__init__(message)
        self.restartable = restartable
