"""One picklable exception hierarchy. Every message says what is wrong, what was given, what was
expected and how to mend it; the parts stay readable as attributes after a trip between processes."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.hidden import masked


class TandemError(Exception):
    """An error the user can act on.

    Args:
        message: what is wrong, one sentence.
        field: the config key, column, file or argument concerned.
        got: what was given.
        expected: what would have been right.
        remedy: what to do now.
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
    """The config, or a command line, asks for something impossible or unknown."""


class ConfigErrors(ConfigError):
    """All that is wrong with a config, reported at once.

    Args:
        errors: the single errors, in the order of the config's fields.
        readings: how keys of another command line were read that are not among them.
    """

    def __init__(self, errors: list[ConfigError], readings: Sequence[Any] = ()) -> None:
        self.errors = errors
        self.readings = tuple(readings)
        super().__init__(f"{len(errors)} error(s) in the config")

    def __str__(self) -> str:
        return "\n".join([self.message, *(str(error) for error in self.errors)])


class DataError(TandemError, ValueError):
    """A data file, a row of it, or a batch has the wrong shape or content."""


class NoTokensError(DataError):
    """No token of a mini-batch counts, so that there is nothing to learn from it."""


class FileError(TandemError, OSError):
    """A file or a folder cannot be read or written, or a connection failed."""

    @classmethod
    def of(cls, error: OSError, path: Path | str | None = None) -> FileError:
        """The error of the operating system, with the file that it is about.

        Args:
            path: the file, where the error does not name it.
        """
        if isinstance(error, cls):
            return error
        name = path if error.filename is None else error.filename
        found = cls(
            "cannot be read or written" if name else "the operating system refused what was asked of it",
            field=None if name is None else str(name),
            got=error.strerror or str(error) or type(error).__name__,
            remedy=_REMEDIES.get(error.errno or 0),
        )
        found.errno = error.errno
        return found


_FULL = "free space there, or write elsewhere; a run goes on from its last checkpoint with the same command"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.ENOENT: "check the path; paths are relative to the working folder",
    errno.EISDIR: "name a file; this is a folder",
    errno.ENOTDIR: "name a folder; this, or a part of its path, is a file",
    errno.EEXIST: "name another path; something is there already",
    errno.EACCES: "choose another path, or mend its permissions",
    errno.EROFS: "write elsewhere; this file system can only be read",
}


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Let an error of the operating system inside be a `FileError` of this file."""
    try:
        yield
    except OSError as error:
        raise FileError.of(error, path) from error


class ModelError(TandemError, ValueError):
    """A model or tokenizer folder cannot be used."""


class IncompleteModelError(ModelError):
    """Files of a model folder are missing or cut off; another machine may have them."""


class RewardError(TandemError, ValueError):
    """A reward function raised, or returned something that is not a finite score."""


class CheckpointError(TandemError, RuntimeError):
    """A checkpoint is damaged, missing, or does not fit this run."""


class EngineError(TandemError, RuntimeError):
    """An engine cannot do what was asked of it."""


class DeviceMemoryError(EngineError):
    """The memory of a device did not suffice for a pass of a model.

    Args:
        message, options: see `TandemError`.
        use: what `tandem.device.memory_use` said of the device then.

    Attributes:
        role, training: of the model, and whether it was trained; set by its worker.
        held: bytes by what they were for, set there too; empty where nothing was measured.
    """

    def __init__(self, message: str, *, use: Mapping[str, int], **options: Any) -> None:
        super().__init__(message, **options)
        self.use = dict(use)
        self.role, self.training = "", False
        self.held: dict[str, float] = {}


class NonFiniteError(TandemError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class WorkerFailure(TandemError, RuntimeError):
    """A worker raised, died or stopped answering; the message is the whole report.

    Args:
        message: which worker, in which method, and what everybody else was doing.
        restartable: whether the same run, started again, may get further: true unless the cause is an error
            that the user has to act on.
    """

    def __init__(self, message: str, *, restartable: bool) -> None:
        super().__init__(message)
        self.restartable = restartable
