"""Load code: the modules of a package, and a user's function from its reference.

A function from an interactive prompt or a notebook is written to a file in the run folder, from which other
processes load it; see `write_function`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import pickle
import pkgutil
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from tandem.errors import ConfigError
from tandem.trusted import read_own, sign, trust

CODE_FILES = (".py", ".pkl")
"""Suffixes of files with functions: Python source, or files that `write_function` wrote."""

MOVED = {"tandem.trainer.demo": "tandem.demo"}
"""A dict from the old name of a module or package, which configs may contain, to the new name."""


def import_submodules(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that each module registers its functions."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def import_named(name: str) -> ModuleType:
    """Import the module with a dotted name, which may be an old name (`MOVED`).

    Raises:
        ImportError: the module does not exist. Other errors that the module raises on import are not caught.
    """
    package, rest = name, ""
    while package and package not in MOVED:
        package, _, last = package.rpartition(".")
        rest = f".{last}{rest}"
    return importlib.import_module(f"{MOVED[package]}{rest}" if package else name)


def load_function(reference: str) -> Callable[..., Any]:
    """Return the function that `path/to/file.py:function` or `package.module:function` names.

    Raises:
        ConfigError: the file, module or function does not exist, or the module fails on import.
    """
    module, name = load_module(reference)
    functions = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
    if name not in functions:
        raise ConfigError(
            "this module has no such function", field=reference, got=name, expected=sorted(functions)
        )
    return functions[name]


def load_module(reference: str) -> tuple[ModuleType, str]:
    """Return the module and the name of a reference.

    The reference is `path/to/file.py:name`, `path/to/file.pkl:name` or `package.module:name`.

    Raises:
        ConfigError: the file or module does not exist or fails on import, or a `.pkl` file is not trusted.
    """
    source, _, name = reference.rpartition(":")
    try:
        is_file = source.endswith(CODE_FILES)
        return _module_of_file(Path(source).resolve()) if is_file else import_named(source), name
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "the module could not be imported",
            field=reference,
            got=f"{type(error).__name__}: {error}",
            expected="path/to/file.py:name or package.module:name",
            remedy="put the module on PYTHONPATH, or give the path of a file that ends in .py",
        ) from error


@functools.cache
def _module_of_file(path: Path) -> ModuleType:
    """Execute a file as a module. This happens once per process and path."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    return execute_file(path, f"{path.stem}_{digest}")


class _FromSource(SourceFileLoader):
    """A loader that always compiles the source file.

    Python's cached bytecode can be outdated: Python does not detect a change within the same second if the
    file's size is unchanged.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def execute_file(path: Path, name: str) -> ModuleType:
    """Execute the current version of a user's Python file, as a module with the given name.

    For a `.pkl` file, the module contains the function that `write_function` wrote.

    Raises:
        ConfigError: a `.pkl` file was not written by a run of this user.
    """
    if path.suffix == ".pkl":
        module = ModuleType(name)
        vars(module).update(pickle.loads(read_own(path)))
        return module
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up a class's module there
    spec.loader.exec_module(module)
    return module


def write_function(function: Callable[..., Any], folder: Path) -> tuple[Path, str]:
    """Write a function and the objects that it refers to into a file for `load_module`.

    cloudpickle writes the file. Importable objects are stored as names, and all other objects with their
    current values. A signature next to the file proves that a run of this user wrote it. The file's name
    depends on the source, so a function whose source has changed is written to another file.

    Args:
        function: the function.
        folder: the folder for the file.

    Returns:
        the file, `NAME-HASH.pkl`, and the function's name in it.

    Raises:
        ConfigError: the function refers to an object that cannot be pickled, such as an open file or a lock.
    """
    whole = getattr(function, "func", function)  # the function of a functools.partial
    name = getattr(whole, "__name__", type(whole).__name__).strip("<>")
    module = sys.modules.get(getattr(whole, "__module__", ""))
    # Other processes cannot import a module that `runpy.run_path` executes: store its functions by value.
    by_value = module is not None and module.__name__ != "__main__" and module.__spec__ is None
    try:
        with ExitStack() as stack:
            if by_value:
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
            pickled = cloudpickle.dumps({name: function})
    except Exception as error:
        raise ConfigError(
            f"the function cannot be sent to other processes: {error}",
            field=name,
            remedy="create what it holds (clients, locks, open files, models) inside the function, or "
            "put the function into a file and give its name: file.py:function",
        ) from error
    try:
        told = inspect.getsource(function).encode()
    except (OSError, TypeError):  # there is no source, e.g. at a prompt: use the code instead
        told = pickled
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hashlib.blake2b(told, digest_size=4).hexdigest()}.pkl"
    path.write_bytes(pickled)
    sign(path)
    trust(path)
    return path, name
