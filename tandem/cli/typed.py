"""Commands whose options Typer reads from a function.

The signature gives types and defaults. The docstring gives the help texts.
"""

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
"""A command: a function from the words after the command's name to the exit status."""

Works = Mapping[str, tuple[Callable[..., None], str]]
"""A dict from the name of a subcommand to its function and an example."""

_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]
"""The base class of Typer's command line errors, from click or from Typer's copy of click."""

_INTERRUPTED = 130
"""The exit status of Typer after Ctrl-C."""

_MEANING = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


class UsageError(ConfigError):
    """Raised for an invalid command line."""

    exit_code = 2


def command(function: Callable[..., None]) -> Command:
    """Return a command for a function, with the function's name; see `run_typed`."""
    return partial(run_typed, function.__name__, function)


def run_work(name: str, works: Works, arguments: list[str], alone: Command) -> int:
    """Run a command with subcommands. The first word names the subcommand.

    Args:
        name: name of the command.
        works: the subcommands.
        arguments: the words after the command's name.
        alone: the command that runs if the first word is not a subcommand.
    """
    if not arguments or arguments[0] not in works:
        return alone(arguments)
    work, *rest = arguments
    function, example = works[work]
    return run_typed(f"{name} {work}", function, rest, example=example)


def run_typed(name: str, function: Callable[..., None], arguments: list[str], *, example: str = "") -> int:
    """Run a command of `tandem`.

    Args:
        name: name of the command.
        function: the function of the command. Its signature declares the options. Its docstring is the text
            of --help, and the docstring's `Args:` section describes each option.
        arguments: the words after the command's name.
        example: a command line that --help shows first.

    Returns:
        the exit status.

    Raises:
        UsageError: an option is unknown, or a value is missing or invalid.
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
    """Return the description of a command and of its options, from its docstring."""
    text, _, meanings = (getdoc(function) or "").partition("\n\nArgs:\n")
    return text, {option: " ".join(meaning.split()) for option, meaning in _MEANING.findall(meanings)}


def _declare(function: Callable[..., None], meanings: Mapping[str, str]) -> None:
    """Add the descriptions to the function's options.

    A switch is only `--NAME`, without `--no-NAME`. A parameter without a default is an argument.
    """
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
    """Return a command for a function that parses its words itself; --help prints the docstring."""

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
    """Separate options with values from the other words of a command line.

    Args:
        arguments: the words.
        options: names of the options. The value of an option is the next word.
        equals: whether the value may also follow in the same word, after "=".
        remedy: the remedy of the error.

    Returns:
        the other words, and a dict from each given option to its value.

    Raises:
        UsageError: an option has no value.
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
            raise UsageError("this option needs a value", got=name, remedy=remedy)
    return words, given
