"""The program that a sandbox starts: it takes on the limits, gives up what root could do and all system calls
but those of a list, and becomes the solution. It runs alone, by `python -c`, and imports nothing of Tandem.

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
ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
CALLS = """
    read 0 63 write 1 64 pread64 17 67 lseek 8 62 ftruncate 77 46 openat 257 56 close 3 57 close_range 436 436
    stat 4 - lstat 6 - fstat 5 80 newfstatat 262 79 getdents64 217 61 getcwd 79 17 mkdir 83 - mkdirat 258 34
    umask 95 166 fcntl 72 25 ioctl 16 29 dup 32 23 dup2 33 - dup3 292 24 pipe2 293 59
    poll 7 - ppoll 271 73 select 23 - pselect6 270 72 epoll_create1 291 20 epoll_ctl 233 21 epoll_wait 232 -
    epoll_pwait 281 22 socketpair 53 199 getsockname 51 204 sendto 44 206 recvfrom 45 207
    brk 12 214 mmap 9 222 munmap 11 215 mremap 25 216 mprotect 10 226 madvise 28 233 futex 202 98
    clone 56 220 exit 60 93 exit_group 231 94 wait4 61 260 set_robust_list 273 99 rseq 334 293
    getpid 39 172 getppid 110 173 gettid 186 178 getuid 102 174 geteuid 107 175 getgid 104 176 getegid 108 177
    rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 sigaltstack 131 132 restart_syscall 219 128
    alarm 37 - setitimer 38 103
    clock_gettime 228 113 clock_getres 229 114 clock_nanosleep 230 115 times 100 153 getrusage 98 165
    prlimit64 302 261 sched_getaffinity 204 123 getrandom 318 278 uname 63 160
"""
"""All that a program may ask of the kernel, with its number on each architecture."""
FIRST_COMMON = 403
"""From here on calls have one number on all architectures; libraries do without those that are not there."""
TO_ITSELF = "kill 62 129 tgkill 234 131"  # calls whose first argument must be the process itself
RULES: dict[str, list[tuple[int, list[int] | range | int]]] = {
    "openat": [(4, 0o2747703)],  # no O_PATH, and no O_TMPFILE: nobody could see a file without a name grow
    "fcntl": [(2, [0, 1, 2, 3, 4, 1030])],  # copies and flags: no locks, leases, owners or notices
    "ioctl": [(2, [0x5401, 0x5421, 0x5450, 0x5451])],  # is it a terminal, does it wait, is it inherited
    "pipe2": [(2, [0, 0x800, 0x80000, 0x80800])],
    "socketpair": [(0, [1]), (2, [1, 0x801, 0x80001, 0x80801])],  # streams, which reach nobody else
    "sendto": [(8, [0]), (9, [0])],  # to no address
    "mmap": [(6, 0x124833), (7, 0)],  # no huge pages and no locked memory
    "madvise": [(4, [4])],  # no longer needed
    "futex": [(2, [0, 9, 265, 128, 129, 137, 393])],  # wait; wake those of this process
    "clone": [(0, 0x17D0F11)],  # no namespaces, and no sibling of this process
    "clock_gettime": [(0, range(12))],  # the clocks of other processes are below 0
    "clock_getres": [(0, range(12))],
    "clock_nanosleep": [(0, range(12))],
    "prlimit64": [(0, [0]), (2, [0, 1, 2, 3, *range(5, 16)])],  # its own limits, but not that of dumps
    "sched_getaffinity": [(0, [0])],
}
"""What halves of arguments must be: one of some values, or no other bits than these. Halves are counted from
0, and an argument's lower half comes first."""


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


def must_be(half: int, wanted: list[int] | range | int) -> list[bytes]:
    """Return the steps that refuse a call unless half of an argument is what `RULES` wants."""
    if isinstance(wanted, int):
        tests = [step(ANY_OF, 0, 1, wanted ^ 0xFFFFFFFF)]
    else:
        tests = [step(EQUAL, len(wanted) - at, 0, value) for at, value in enumerate(wanted)]
    return [step(LOAD, 0, 0, 16 + 4 * half), *tests, step(RETURN, 0, 0, REFUSED)]


def let_through(calls: str, itself: int | None = None) -> bytes:
    """Return the steps of a filter that let some calls through, and go on to the next step with all others.

    Args:
        itself: what the first argument must be; None: `RULES` say it for each call.
    """
    words, place, steps = calls.split(), ARCHITECTURES[os.uname().machine][0], []
    for name, number in zip(words[::3], words[place::3], strict=True):
        if number != "-":
            rules = RULES.get(name, []) if itself is None else [(0, [itself])]
            then = [each for rule in rules for each in must_be(*rule)] + [step(RETURN, 0, 0, ALLOWED)]
            steps += [step(EQUAL, 0, len(then), int(number)), *then]
    return b"".join(steps)


def allowed_calls(listed: bytes) -> bytes:
    """Return a seccomp filter that lets through what is listed, and refuses all else and other architectures.

    Args:
        listed: the steps of `CALLS`.
    """
    refuse, (_, architecture) = step(RETURN, 0, 0, REFUSED), ARCHITECTURES[os.uname().machine]
    first = [step(LOAD, 0, 0, 4), step(EQUAL, 1, 0, architecture), refuse, step(LOAD, 0, 0, 0)]
    last = [step(AT_LEAST, 0, 2, FIRST_COMMON), step(AT_LEAST, 1, 0, 1 << 30), step(RETURN, 0, 0, NOT_THERE)]
    return b"".join([*first, let_through(TO_ITSELF, os.getpid()), listed, *last, refuse])


def confine(
    listed: bytes, seconds: int, memory: int, file: int, files: int, processes: int = 0, user: int = 0
) -> None:
    """Take the limits on, for this process and all that it starts; those that are 0 are left to the sandbox.

    Args:
        listed: the steps of the filter for `CALLS`.

    Raises:
        OSError: the kernel refuses one of them.
    """
    # With 0 the system's own program still gets the dumps, with 1 it gets none. Where 1 is refused, it is 0.
    call("setrlimit", RLIMIT_CORE, packed(8, 1, 1))
    for limit, most in (
        (RLIMIT_CPU, seconds),
        (RLIMIT_AS, memory),
        (RLIMIT_FSIZE, file),
        (RLIMIT_NOFILE, files),
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
    filters = allowed_calls(listed)
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
    listed = let_through(CALLS)  # before it waits, as it takes as long as a tenth of a run
    if not limits:
        folder, *limits = wait(folder)
    confine(listed, *map(int, limits))
    os.dup2(os.open(f"{folder}/stdin.txt", os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", errors=sys.stdin.errors, closefd=False)  # noqa: SIM115  what it knows is of another
    with open(f"{folder}/program.py", encoding="utf-8") as file:
        program = compile(file.read(), "program.py", "exec", dont_inherit=True)
    os.closerange(3, 64)
    sys.argv = ["program.py"]
    exec(program, {"__name__": "__main__", "__builtins__": __builtins__})
