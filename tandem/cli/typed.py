"""Commands whose options Typer reads off a function's signature."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getdoc

import typer

from tandem.errors import ConfigError

_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]
"""Typer's base of what may be wrong with a command line, click's own or its copy of it."""

_INTERRUPTED = 130
"""What Typer gives back after Ctrl-C."""


class UsageError(ConfigError):
    """A command line that the command does not understand."""

    exit_code = 2


def run_typed(name: str, function: Callable[..., None], arguments: list[str], *, example: str = "") -> int:
    """Runs a command of `tandem`.

    Args:
        name: the command's.
        function: its work; the signature declares its options, the docstring is what --help says.
        example: a command line, with which --help begins.

    Returns:
        the exit status.

    Raises:
        UsageError: an unknown option, a missing or a wrong value.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=f"{example}\n\n{getdoc(function)}" if example else None)(function)
    try:
        status = app(args=arguments, prog_name=f"tandem {name}", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _CommandLineError as error:
        said: Callable[[], str] = getattr(error, "format_message", error.__str__)
        raise UsageError(said(), remedy=f"tandem {name} --help") from error
    if status == _INTERRUPTED:
        raise KeyboardInterrupt
    return 0
