"""The program that a sandbox starts: it takes on the limits, gives up what root could do, and becomes the
solution. It runs alone, by `python -c`, and imports nothing of Tandem.

    python -c inside.py FOLDER [SECONDS MEMORY_BYTES FILE_BYTES OPEN_FILES [PROCESSES USER]]

FOLDER holds program.py and stdin.txt; USER is whom root becomes. Without limits it waits for lines of
arguments, and each becomes a process forked from it, of a folder in FOLDER.
"""

from __future__ import annotations

import _ctypes
import gc
import os
import sys

RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_CORE, RLIMIT_NPROC, RLIMIT_NOFILE, RLIMIT_AS = 0, 1, 4, 6, 7, 9
RLIMIT_MSGQUEUE = 12
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF, PATH_BENEATH = 444, 445, 446, 1
WRITES, FILE_WRITES = 0xFFF2, 0xC002
"""Landlock's rights but those to execute files and to read files and folders; those that files have."""
SIGNALS_AND_SOCKETS = 3
KNOWN = ["bisect", "collections", "copy", "functools", "heapq", "itertools", "json", "math", "random", "re"]
"""Modules that solutions import, which the process that waits has imported."""
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LINUX_CAPABILITY_VERSION_3 = 0x20080522
LOAD, EQUAL, AT_LEAST, ANY_OF, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOWED, REFUSED, NOT_THERE = 0x7FFF0000, 0x00050001, 0x00050026
FIRST_ARGUMENT, SECOND_ARGUMENT, THIRD_ARGUMENT = 16, 24, 32
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = """
    socket 41 198 setsid 112 157 setpgid 109 154 unlink 87 - unlinkat 263 35 rename 82 - renameat 264 38
    renameat2 316 276 fallocate 285 47 ptrace 101 117 process_vm_readv 310 270 process_vm_writev 311 271
    unshare 272 97 setns 308 268 memfd_create 319 279 memfd_secret 447 447 add_key 248 217 request_key 249 218
    keyctl 250 219 shmget 29 194 semget 64 190 msgget 68 186 bpf 321 280 perf_event_open 298 241
    userfaultfd 323 282 open 2 - openat 257 56 clone 56 220 prlimit64 302 261
"""
"""What is refused, with its number on each architecture."""
UNKNOWN = (425, 435, 437)
"""io_uring_setup, clone3 and openat2, on both: programs go on without them."""
NAMELESS = 0o20000000
"""Set in O_TMPFILE and in no other flag: a file without a name, which nobody could see grow."""
NAMESPACES = 0x7E020000
"""Any of clone's flags for a namespace of its own."""
BITS = {
    "open": (SECOND_ARGUMENT, NAMELESS),
    "openat": (THIRD_ARGUMENT, NAMELESS),
    "clone": (FIRST_ARGUMENT, NAMESPACES),
    "prlimit64": (FIRST_ARGUMENT, 0xFFFFFFFF),
}
"""What is refused only where an argument has any of some bits."""


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
    is killed in the end, no file without a name, no namespace, no memory beside what the limits count, no
    other process' memory or limits."""
    machine = os.uname().machine
    words, place = CALLS.split(), 1 + list(ARCHITECTURES).index(machine)
    numbers = {name: int(n) for name, n in zip(words[::3], words[place::3], strict=True) if n != "-"}
    refuse, allow = step(RETURN, 0, 0, REFUSED), step(RETURN, 0, 0, ALLOWED)
    steps = [step(LOAD, 0, 0, 4), step(EQUAL, 1, 0, ARCHITECTURES[machine]), refuse]
    steps += [step(LOAD, 0, 0, 0), step(AT_LEAST, 0, 1, 0x40000000), refuse]
    for number in UNKNOWN:
        steps += [step(EQUAL, 0, 1, number), step(RETURN, 0, 0, NOT_THERE)]
    for name, number in numbers.items():
        if name not in BITS:
            steps += [step(EQUAL, 0, 1, number), refuse]
            continue
        argument, bits = BITS[name]
        steps += [step(EQUAL, 0, 4, number), step(LOAD, 0, 0, argument), step(ANY_OF, 0, 1, bits)]
        steps += [refuse, allow]
    return b"".join([*steps, allow])


def confine(seconds: int, memory: int, file: int, files: int, processes: int = 0, user: int = 0) -> None:
    """Takes the limits on, for this process and all that it starts; those that are 0 are left to the sandbox.

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
    if user:  # of root's processes the system counts none
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if call("capset", packed(4, LINUX_CAPABILITY_VERSION_3, 0), bytes(24)):
        raise OSError("capabilities cannot be given up")
    filters = refused_calls()
    address = id(filters) + bytes.__basicsize__ - 1  # where CPython keeps the bytes
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, packed(8, len(filters) // 8, address)):
        raise OSError("system calls cannot be filtered")


def keep_apart(folder: str) -> None:
    """Confines this process further, in the sandbox of the one that it was forked from: it changes files of
    its own box alone, and signals none but those that it starts.

    Raises:
        OSError: the kernel refuses it.
    """
    rules = call("syscall", LANDLOCK_CREATE_RULESET, packed(8, WRITES, 0, SIGNALS_AND_SOCKETS), 24, 0)
    refused = rules < 0
    for path, rights in ((f"{folder}/box", WRITES), ("/dev/null", FILE_WRITES)):
        rule = packed(8, rights) + packed(4, os.open(path, os.O_PATH))
        refused |= call("syscall", LANDLOCK_ADD_RULE, rules, PATH_BENEATH, rule, 0) != 0
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if refused or call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0):
        raise OSError("a run cannot be kept apart from others")


def wait(parent: str) -> list[str]:
    """Forks for what each line of standard input asks: returns its arguments in the new process, whose output
    goes to the pipes of its folder. Tells of each how it ended, and whether it left another process."""
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in KNOWN:
        __import__(name)
    gc.freeze()  # at its end, each looks through what it has itself
    while asked := os.read(0, 4096).decode().split():
        child = os.fork()
        if not child:
            call("prctl", PR_SET_PDEATHSIG, 9, 0, 0, 0)
            folder = f"{parent}/{asked[0]}"
            for descriptor, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY), descriptor)
            os.chdir(f"{folder}/box")
            keep_apart(folder)
            return [folder, *asked[1:]]
        code, left = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ""
        try:
            while not left:
                left = "" if os.waitpid(-1, os.WNOHANG)[0] else " left"
        except ChildProcessError:  # all have ended
            pass
        os.write(1, f"{code}{left}".encode())
    os._exit(0)


if __name__ == "__main__":
    folder, *limits = sys.argv[1:]
    if not limits:
        folder, *limits = wait(folder)
    confine(*map(int, limits))
    os.dup2(os.open(f"{folder}/stdin.txt", os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", errors=sys.stdin.errors, closefd=False)  # noqa: SIM115  what it knows is of another
    with open(f"{folder}/program.py", encoding="utf-8") as file:
        program = compile(file.read(), "program.py", "exec", dont_inherit=True)
    os.closerange(3, 64)
    sys.argv = ["program.py"]
    exec(program, {"__name__": "__main__", "__builtins__": __builtins__})
