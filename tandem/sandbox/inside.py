"""The program that a sandbox starts: it takes on the limits, gives up what root could do, and becomes the
solution. It runs alone, by `python -c`, and so imports little, and nothing of Tandem.

    python -c inside.py FOLDER SECONDS MEMORY_BYTES FILE_BYTES OPEN_FILES PROCESSES

FOLDER holds program.py and stdin.txt; PROCESSES may be 0, where the sandbox counts them itself.
"""

from __future__ import annotations

import _ctypes
import os
import sys

RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_CORE, RLIMIT_NPROC, RLIMIT_NOFILE, RLIMIT_AS = 0, 1, 4, 6, 7, 9
RLIMIT_MSGQUEUE = 12
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LINUX_CAPABILITY_VERSION_3 = 0x20080522
LOAD, EQUAL, AT_LEAST, ANY_OF, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOWED, REFUSED, NOT_THERE = 0x7FFF0000, 0x00050001, 0x00050026
FIRST_ARGUMENT, THIRD_ARGUMENT = 16, 32
SYSCALLS = {
    # the architecture; socket, setsid, setpgid; io_uring_setup, openat2; openat; prlimit64
    "x86_64": (0xC000003E, (41, 112, 109), (425, 437), 257, 302),
    "aarch64": (0xC00000B7, (198, 157, 154), (425, 437), 56, 261),
}
NAMELESS = 0o20000000
"""Set in O_TMPFILE and in no other flag: a file without a name, which nobody could see grow."""
ANY = 0xFFFFFFFF


def call(name: str, *arguments: int | bytes) -> int:
    """Calls a function of the C library. Imports are what a run's start costs, so that `ctypes`, `struct` and
    `resource` are done without."""
    library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
    address = _ctypes.dlsym(library, name)
    result: int = _ctypes.call_cdeclfunction(address, arguments)
    return result


def packed(size: int, *numbers: int) -> bytes:
    """Numbers as the kernel reads them, each in some bytes."""
    return b"".join(number.to_bytes(size, sys.byteorder) for number in numbers)


def step(code: int, if_so: int, if_not: int, value: int) -> bytes:
    """An instruction of a filter; the middle numbers are how many to skip."""
    return packed(2, code) + packed(1, if_so, if_not) + packed(4, value)


def refused_calls() -> bytes:
    """A seccomp filter on top of the sandbox's own: no socket of any kind, no leaving the process group that
    is killed in the end, no file without a name, no other process' limits."""
    architecture, refused, unknown, openat, prlimit = SYSCALLS[os.uname().machine]
    refuse, allow = step(RETURN, 0, 0, REFUSED), step(RETURN, 0, 0, ALLOWED)
    steps = [step(LOAD, 0, 0, 4), step(EQUAL, 1, 0, architecture), refuse]
    steps += [step(LOAD, 0, 0, 0), step(AT_LEAST, 0, 1, 0x40000000), refuse]
    for number in refused:
        steps += [step(EQUAL, 0, 1, number), refuse]
    for number in unknown:
        steps += [step(EQUAL, 0, 1, number), step(RETURN, 0, 0, NOT_THERE)]
    for number, argument, bits in ((openat, THIRD_ARGUMENT, NAMELESS), (prlimit, FIRST_ARGUMENT, ANY)):
        steps += [
            step(EQUAL, 0, 4, number),
            step(LOAD, 0, 0, argument),
            step(ANY_OF, 0, 1, bits),
            refuse,
            allow,
        ]
    return b"".join([*steps, allow])


def confine(seconds: int, memory: int, file: int, files: int, processes: int) -> None:
    """Takes the limits on, for this process and all that it starts.

    Raises:
        OSError: the kernel refuses one of them.
    """
    for limit, most in (
        (RLIMIT_CORE, 0),
        (RLIMIT_CPU, seconds),
        (RLIMIT_AS, memory),
        (RLIMIT_FSIZE, file),
        (RLIMIT_NOFILE, files),
        (RLIMIT_MSGQUEUE, 0),
        *([(RLIMIT_NPROC, processes)] if processes else []),
    ):
        if call("setrlimit", limit, packed(8, most, most)):
            raise OSError("a limit cannot be set")
    if call("capset", packed(4, LINUX_CAPABILITY_VERSION_3, 0), bytes(24)):
        raise OSError("capabilities cannot be given up")
    filters = refused_calls()
    address = id(filters) + bytes.__basicsize__ - 1  # where CPython keeps the bytes
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, packed(8, len(filters) // 8, address)):
        raise OSError("system calls cannot be filtered")


if __name__ == "__main__":
    folder = sys.argv[1]
    confine(*map(int, sys.argv[2:7]))
    os.dup2(os.open(f"{folder}/stdin.txt", os.O_RDONLY), 0)
    with open(f"{folder}/program.py", encoding="utf-8") as file:
        program = compile(file.read(), "program.py", "exec", dont_inherit=True)
    os.closerange(3, 64)
    sys.argv = ["program.py"]
    exec(program, {"__name__": "__main__", "__builtins__": __builtins__})
