"""A replacement of the package sglang-kernel, which exists for CUDA only.

A server on a CPU imports its names, but calls none of them.
"""


def _missing(name):
    def call(*_args, **_options):
        raise RuntimeError(f"sgl_kernel.{name} needs the package sglang-kernel, which needs CUDA")

    return call


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
