"""Commands whose options Typer reads off a function: types and defaults off its signature, their meanings off
its docstring."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, getdoc, signature
from typing import Annotated, Any, get_type_hints

import typer

from tandem.errors import ConfigError

Command = Callable[[list[str]], int]
"""Takes the words after the command's name, and gives the exit status."""

Works = Mapping[str, tuple[Callable[..., None], str]]
"""The works of a command by name, each with an example."""

_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]
"""Typer's base of what may be wrong with a command line, click's own or its copy of it."""

_INTERRUPTED = 130
"""What Typer gives back after Ctrl-C."""

_MEANING = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


class UsageError(ConfigError):
    """A command line that the command does not understand."""

    exit_code = 2


def command(function: Callable[..., None]) -> Command:
    """Make a function the command of its name; see `run_typed`."""
    return partial(run_typed, function.__name__, function)


def run_work(name: str, works: Works, arguments: list[str], alone: Command) -> int:
    """Run a command of several works, of which the first word names one.

    Args:
        name: the command's.
        alone: runs where no work is named.
    """
    if not arguments or arguments[0] not in works:
        return alone(arguments)
    work, *rest = arguments
    function, example = works[work]
    return run_typed(f"{name} {work}", function, rest, example=example)


def run_typed(name: str, function: Callable[..., None], arguments: list[str], *, example: str = "") -> int:
    """Run a command of `tandem`.

    Args:
        name: the command's.
        function: its work; the signature declares its options, the docstring is what --help says, and its
            `Args:` are what --help says of each option.
        example: a command line, with which --help begins.

    Returns:
        the exit status.

    Raises:
        UsageError: an unknown option, a missing or a wrong value.
    """
    text, meanings = described(function)
    _declare(function, meanings)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=f"{example}\n\n{text}" if example else text)(function)
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


def described(function: Callable[..., None]) -> tuple[str, dict[str, str]]:
    """Return what a command does, and the meanings of its options, as its docstring says."""
    text, _, meanings = (getdoc(function) or "").partition("\n\nArgs:\n")
    return text, {option: " ".join(meaning.split()) for option, meaning in _MEANING.findall(meanings)}


def _declare(function: Callable[..., None], meanings: Mapping[str, str]) -> None:
    """Give the function's options their meanings. A switch is `--NAME` alone, and what has no default is an
    argument."""
    hints = get_type_hints(function, include_extras=True)
    for name, meaning in meanings.items():
        declared: list[Any] = list(getattr(hints[name], "__metadata__", ()))
        if not declared:
            needed = signature(function).parameters[name].default is Parameter.empty
            switch = [f"--{name}"] if hints[name] is bool else []
            declared = [typer.Argument() if needed else typer.Option(*switch)]
            hints[name] = Annotated[hints[name], declared[0]]
        declared[0].help = meaning
    function.__annotations__ = hints


def worded(function: Command) -> Command:
    """Make a function that reads its words itself a command: --help prints its docstring."""

    @wraps(function)
    def run(arguments: list[str]) -> int:
        if {"-h", "--help"} & set(arguments):
            print(getdoc(function))
            return 0
        return function(arguments)

    return run


def valued(
    arguments: Sequence[str], options: Collection[str], *, equals: bool = False, remedy: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """Cut options out of a command line whose other words are somebody else's.

    Args:
        options: each has a value, the next word.
        equals: whether the value may also follow in the same word, after "=".
        remedy: of the error.

    Returns:
        the other words, and the value of each option that was given.

    Raises:
        UsageError: an option without its value.
    """
    words, given, rest = list[str](), dict[str, str](), deque(arguments)
    while rest:
        word = rest.popleft()
        name, sign, value = word.partition("=") if equals else (word, "", "")
        if name not in options:
            words.append(word)
        elif sign or rest:
            given[name] = value if sign else rest.popleft()
        else:
            raise UsageError("an option without its value", got=name, remedy=remedy)
    return words, given
