"""The option `--from-verl SCRIPT.sh`: run Tandem with the settings of a shell script that calls verl."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cli.typed import UsageError, valued
from tandem.config.hydra import VERLS_DEFAULTS
from tandem.config.load import Loaded, load_train_config
from tandem.config.root import TrainConfig
from tandem.config.sources import split_arguments
from tandem.errors import ConfigError, ConfigErrors
from tandem.migrate import environment
from tandem.migrate.script import Script
from tandem.migrate.table import print_table
from tandem.migrate.verl_call import understood
from tandem.observability.terminal import warn
from tandem.peers.table import Reading
from tandem.peers.translate import Translation

OPTION, CALL, LIMIT = "--from-verl", "--call", "--script-limit"


@dataclass(frozen=True)
class Request:
    """The options of `--from-verl` on a command line.

    Attributes:
        script: the shell script.
        arguments: the arguments of the script.
        call: the number of the script's call of verl to use; the first call is 1.
        limit_s: the time limit for running the script in the sandbox, in seconds; None: the default.
        words: the other words of the command line.
    """

    script: str
    arguments: tuple[str, ...]
    call: int
    limit_s: float | None
    words: tuple[str, ...]


def requested(arguments: Sequence[str]) -> Request | None:
    """Parse the option `--from-verl` and its related options; return None without `--from-verl`.

    Raises:
        UsageError: an option has no value, or a value that is not a number.
    """
    own = list(arguments)
    if not any(word.split("=", 1)[0] == OPTION for word in own):
        return None
    at = own.index("--") if "--" in own else len(own)
    words, given = valued(own[:at], (OPTION, CALL, LIMIT), equals=True, remedy="tandem train --help")
    call, limit_s = _number(given, CALL), _number(given, LIMIT)
    if call is not None and call != int(call):
        raise UsageError("must be a whole number", field=CALL, got=given[CALL])
    return Request(given[OPTION], tuple(own[at + 1 :]), int(call or 1), limit_s, tuple(words))


def _number(given: dict[str, str], name: str) -> float | None:
    try:
        number = float(given[name]) if name in given else None
    except ValueError:
        number = 0.0
    if number is not None and not number > 0:
        raise UsageError("must be a number above 0", field=name, got=given[name])
    return number


def _arguments(request: Request) -> tuple[str, ...]:
    """Change this process to the call's folder and environment, and return the words of the call."""
    script = Script.read(request.script, request.arguments, limit_s=request.limit_s)
    call = script.call(request.call)
    for command in script.others:
        warn(f"this command of the script is not run: {command}")
    for other in script.calls if len(script.calls) > 1 else ():
        if other.number == call.number:
            warn(f"call {other.number} (used): {' '.join(other.words)}")
        else:
            words = " ".join(word for word in other.words if word not in call.words)
            warn(f"call {other.number} (use {CALL} {other.number} to choose it), words that differ: {words}")
    asked = understood(call)
    print_table("environment of the call", environment.readings(asked.variables))
    for sentence in asked.around:
        warn(f"note: {sentence}")
    os.environ.update(asked.variables)
    if asked.folder != os.getcwd():
        warn(f"note: as in the script, paths are relative to {asked.folder}")
        os.chdir(asked.folder)
    return asked.arguments


def load(request: Request) -> Loaded[TrainConfig]:
    """Return the config for a script's call of verl, and print the translation of its settings.

    Afterwards, this process has the working folder and the environment of the call.

    Raises:
        ConfigError: the script does not have this call, the call is not a call of verl's PPO trainer, or some
            of its settings are refused. A table lists the refused settings.
    """
    path, overrides = split_arguments([*VERLS_DEFAULTS, *_arguments(request), *request.words])
    try:
        loaded = load_train_config(path, overrides)
    except ConfigErrors as errors:
        print_table("settings", [*map(_refused, errors.errors), *errors.readings])
        raise ConfigError(
            f"{len(errors.errors)} of the script's settings cannot be used; the table names them",
            remedy="change them in the script, or add words after it: key=value overrides a setting, ~key "
            "removes it",
        ) from errors
    print_table("settings", loaded.readings)
    warn("all other settings have the same names and effects here")
    for notice in loaded.notices:
        if notice not in Translation(readings=list(loaded.readings)).notices:
            warn(f"note: {notice}")
    return loaded


def _refused(error: ConfigError) -> Reading:
    parts = [error.message]
    if error.expected is not None:
        parts.append(f"expected {error.expected}")
    if error.remedy is not None:
        parts.append(error.remedy)
    name, value = (error.field, error.got) if error.field else (error.got, "")
    return Reading(str(name), "" if value is None else value, "refused", "; ".join(parts))
