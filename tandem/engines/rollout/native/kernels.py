"""Functions that compile `kernels.cpp` at first use and load the library.

The libraries are in a cache folder of the user, one per element type, processor and compiler. If several
processes start at the same time, each process builds its own library, and the last rename wins. The libraries
use the OpenMP library of PyTorch. Another OpenMP library would start a second thread pool.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("kernels.cpp")
_COMPILE = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp"),
    *("-fno-exceptions", "-fno-math-errno", "-fno-trapping-math"),
)
_LINK = ("-shared", "-Wl,-z,defs")
_DTYPES = {torch.float32: (), torch.bfloat16: ("-DBF16",)}
_COMPILE_SECONDS = 120.0

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "write": (_POINTER, _SIZE, _SIZE) * 2 + (_POINTER,) * 3 + (_SIZE,) * 5 + (_INT,),
    "attend": (_POINTER,) * 6 + (_SIZE, _POINTER) + (_SIZE,) * 8 + (_FLOAT, _POINTER, _INT),
    "norm": (_POINTER,) * 4 + (_SIZE,) * 2 + (_FLOAT, _INT),
    "rotate": (_POINTER,) * 6 + (_FLOAT,) * 2 + (_SIZE,) * 5 + (_INT,),
    "gate": (_POINTER,) * 2 + (_SIZE,) * 2 + (_INT,),
}


@cache
def load_kernels(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library with the functions of `kernels.cpp` for this element type, or None.

    The result is None for a dtype without kernels. It is also None if the kernels cannot be built. Then a
    warning states the reason.
    """
    if dtype not in _DTYPES:
        return None
    try:
        library = ctypes.CDLL(str(_build(_DTYPES[dtype])))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        warnings.warn(
            "generation on this CPU is slower, because the kernels could not be compiled: "
            f"{detail.strip()[-500:]}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    library.max_value_dim.restype = ctypes.c_int64
    return library


def _build(defines: tuple[str, ...]) -> Path:
    """Return the path of the compiled library. Build the library if it does not exist.

    Raises:
        OSError: There is no compiler or no OpenMP library, or the folder cannot be written.
        subprocess.SubprocessError: The compiler fails or takes too long.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler (g++) on the PATH")
    openmp, source, flags = _loaded_openmp(), _SOURCE.read_text(encoding="utf-8"), (*_COMPILE, *defines)
    version = _run((compiler, "--version"), 10.0)
    identity = repr((source, flags, _LINK, openmp.name, compiler, version, _processor()))
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("TANDEM_CACHE_DIR") or Path(caches) / "tandem")
    target = folder / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if target.exists():
        return target
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        part, made = f"{work}/kernels.o", f"{work}/kernels.so"
        _run((compiler, *flags, "-c", str(_SOURCE), "-o", part), _COMPILE_SECONDS)
        _run((compiler, *_LINK, part, str(openmp), "-o", made), _COMPILE_SECONDS)
        Path(made).replace(target)
    return target


def _run(command: tuple[str, ...], timeout_s: float) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s).stdout


def _loaded_openmp() -> Path:
    """Return the path of the GNU OpenMP library that PyTorch has loaded into this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
    if not loaded:
        raise FileNotFoundError("this PyTorch does not use GNU OpenMP")
    return Path(max(loaded, key=lambda path: "torch" in path))


def _processor() -> str:
    """Return the names of the processor features that the compiler option -march=native uses.

    These features are part of the library's file name, because different machines may share a cache folder.
    """
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    keys = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(keys)}))
