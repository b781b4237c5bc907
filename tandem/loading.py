"""Finding algorithms: the modules of a package, and a user's own function by reference. A function that a
program made goes to other processes, and into the run folder, as a file too: see `write_function`."""

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
"""The endings of files that hold functions: Python's source, or what `write_function` wrote."""

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
    """The module, and the name, of `path/to/file.py:name`, of a `.pkl` file likewise, or of
    `package.module:name`.

    Raises:
        ConfigError: no such file or module, one that fails on import, or a `.pkl` file of somebody else.
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
            remedy="a module must be on PYTHONPATH; a file needs its path, ending in .py",
        ) from error


@functools.cache
def _module_of_file(path: Path) -> ModuleType:
    """Executes a file as a module, once per process, whatever it is called and wherever it stands."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    return execute_file(path, f"{path.stem}_{digest}")


class _FromSource(SourceFileLoader):
    """Compiles a file anew: the bytecode that Python keeps is taken for that of a file which changed in the
    same second and has the same size."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def execute_file(path: Path, name: str) -> ModuleType:
    """Execute a user's Python file as a module of that name, as the file is now; that of a `.pkl` file has
    the function that was written there.

    Raises:
        ConfigError: a `.pkl` file that no run of this user wrote.
    """
    if path.suffix == ".pkl":
        module = ModuleType(name)
        vars(module).update(pickle.loads(read_own(path)))
        return module
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    spec.loader.exec_module(module)
    return module


def write_function(function: Callable[..., Any], folder: Path) -> tuple[Path, str]:
    """Write a function, with what it refers to, into a file that `load_module` reads, as cloudpickle does:
    what can be imported goes by name, all else as it is now. A signature beside it says that this user's run
    wrote it. The file's name tells the source: a function
    whose source has changed goes to another file.

    Returns:
        the file, `NAME-HASH.pkl`, and the function's name in it.

    Raises:
        ConfigError: it holds what cannot be written, such as an open file or a lock.
    """
    whole = getattr(function, "func", function)  # of functools.partial
    name = getattr(whole, "__name__", type(whole).__name__).strip("<>")
    module = sys.modules.get(getattr(whole, "__module__", ""))
    # Nobody else could import a module that `runpy.run_path` executes: its functions go by value.
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
            remedy="make what it holds (clients, locks, open files, models) inside of it, or put it into a "
            "file and name that: file.py:function",
        ) from error
    try:
        told = inspect.getsource(function).encode()
    except (OSError, TypeError):  # typed at a prompt, or compiled: its code then stands for its source
        told = pickled
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hashlib.blake2b(told, digest_size=4).hexdigest()}.pkl"
    path.write_bytes(pickled)
    sign(path)
    trust(path)
    return path, name
