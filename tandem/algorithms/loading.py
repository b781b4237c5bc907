"""Finding algorithms: the modules of a package, and a user's own function by reference."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.errors import ConfigError

MOVED = {"tandem.trainer.demo": "tandem.demo"}
"""Modules and packages that a config may name by where they once were, and where they are."""


def import_submodules(package: str, path: Iterable[str]) -> None:
    """Imports every module of a package, so that each registers what it defines."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def import_named(name: str) -> ModuleType:
    """Imports the module of a dotted name, which may be one that it had earlier (`MOVED`).

    Raises:
        ImportError: no such module. Whatever else the module raises on import passes through.
    """
    package, rest = name, ""
    while package and package not in MOVED:
        package, _, last = package.rpartition(".")
        rest = f".{last}{rest}"
    return importlib.import_module(f"{MOVED[package]}{rest}" if package else name)


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `path/to/file.py:function` or `package.module:function` names.

    Raises:
        ConfigError: no such file or module, one that fails on import, or no such function in it.
    """
    module, name = load_module(reference)
    functions = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
    if name not in functions:
        raise ConfigError(
            "no such function in this module", field=reference, got=name, expected=sorted(functions)
        )
    return functions[name]


def load_module(reference: str) -> tuple[ModuleType, str]:
    """The module of `path/to/file.py:name` or `package.module:name`, and the name.

    Raises:
        ConfigError: no such file or module, or one that fails on import.
    """
    source, _, name = reference.rpartition(":")
    try:
        is_file = source.endswith(".py")
        return _module_of_file(Path(source).resolve()) if is_file else import_named(source), name
    except Exception as error:
        raise ConfigError(
            "the module could not be imported",
            field=reference,
            got=f"{type(error).__name__}: {error}",
            expected="path/to/file.py:name or package.module:name",
            remedy="a module must be on PYTHONPATH; a file needs its path, ending in .py",
        ) from error


@functools.cache
def _module_of_file(path: Path) -> ModuleType:
    """Executes a file as a module, once per process, whatever it is called and wherever it stands."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{digest}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
