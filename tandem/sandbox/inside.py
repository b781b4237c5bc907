"""The program that starts inside a sandbox and becomes the solution.

The program sets the limits, gives up root's privileges, allows only a list of system calls, and then runs the
solution in the same process. It is started with `python -c` and imports no module of Tandem.

    python -c inside.py FOLDER [SECONDS MEMORY_BYTES FILE_BYTES OPEN_FILES [PROCESSES USER]]

FOLDER contains program.py and stdin.txt. USER is the user ID that root switches to. Without limits, the
program waits for lines of arguments on standard input. For each line it forks a process, which runs the
solution of a subfolder of FOLDER.
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
"""Landlock rights.

WRITES are all rights except executing files and reading files and folders. FILE_WRITES are the rights among
WRITES that apply to files.
"""
SIGNALS_AND_SOCKETS = 3
KNOWN = ["bisect", "collections", "copy", "functools", "heapq", "itertools", "json", "math", "random", "re"]
"""Modules that solutions often import; the waiting process imports them in advance."""
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
"""All system calls that a program may make, with the number of each on x86_64 and aarch64 ("-": none)."""
FIRST_COMMON = 403
"""The first system call number from which on numbers are the same on all architectures.

The filter reports these calls as not implemented, because libraries can work without them.
"""
TO_ITSELF = "kill 62 129 tgkill 234 131"  # system calls whose first argument must be the process itself
RULES: dict[str, list[tuple[int, list[int] | range | int]]] = {
    "openat": [(4, 0o2747703)],  # no O_PATH; no O_TMPFILE, because an unnamed file's size cannot be watched
    "fcntl": [(2, [0, 1, 2, 3, 4, 1030])],  # only duplicates and flags: no locks, leases or notifications
    "ioctl": [(2, [0x5401, 0x5421, 0x5450, 0x5451])],  # terminal queries, non-blocking mode, close-on-exec
    "pipe2": [(2, [0, 0x800, 0x80000, 0x80800])],
    "socketpair": [(0, [1]), (2, [1, 0x801, 0x80001, 0x80801])],  # only streams within the program
    "sendto": [(8, [0]), (9, [0])],  # only without an address
    "mmap": [(6, 0x124833), (7, 0)],  # no huge pages and no locked memory
    "madvise": [(4, [4])],  # only MADV_DONTNEED
    "futex": [(2, [0, 9, 265, 128, 129, 137, 393])],  # wait, and wake threads of this process
    "clone": [(0, 0x17D0F11)],  # no new namespaces, and no sibling processes
    "clock_gettime": [(0, range(12))],  # negative numbers are clocks of other processes
    "clock_getres": [(0, range(12))],
    "clock_nanosleep": [(0, range(12))],
    "prlimit64": [(0, [0]), (2, [0, 1, 2, 3, *range(5, 16)])],  # own limits, except that of core dumps
    "sched_getaffinity": [(0, [0])],
}
"""Rules for arguments of system calls, as pairs (half, wanted).

A half is 32 bits of an argument. Halves are counted from 0, and the lower half of an argument comes first.
The half must equal one of the values in `wanted`. If `wanted` is an int, the half must not set any other
bits.
"""


def call(name: str, *arguments: int | bytes) -> int:
    """Call a function of the C library.

    Imports dominate the start time of a run, so this avoids `ctypes`, `struct` and `resource`.
    """
    library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
    address = _ctypes.dlsym(library, name)
    result: int = _ctypes.call_cdeclfunction(address, arguments)
    return result


def packed(size: int, *numbers: int) -> bytes:
    """Convert numbers to bytes in the kernel's byte order, `size` bytes each."""
    return b"".join(number.to_bytes(size, sys.byteorder) for number in numbers)


def step(code: int, if_so: int, if_not: int, value: int) -> bytes:
    """Build one instruction of a seccomp filter.

    `if_so` and `if_not` are the numbers of instructions to skip if the test is true or false.
    """
    return packed(2, code) + packed(1, if_so, if_not) + packed(4, value)


def must_be(half: int, wanted: list[int] | range | int) -> list[bytes]:
    """Return the instructions that refuse a call unless half of an argument fits `wanted`; see `RULES`."""
    if isinstance(wanted, int):
        tests = [step(ANY_OF, 0, 1, wanted ^ 0xFFFFFFFF)]
    else:
        tests = [step(EQUAL, len(wanted) - at, 0, value) for at, value in enumerate(wanted)]
    return [step(LOAD, 0, 0, 16 + 4 * half), *tests, step(RETURN, 0, 0, REFUSED)]


def let_through(calls: str, itself: int | None = None) -> bytes:
    """Return the instructions that allow some calls, and go to the next instruction for other calls.

    Args:
        calls: the calls, in the format of `CALLS`.
        itself: the value that the first argument must have; None applies `RULES` to each call.
    """
    words, place, steps = calls.split(), ARCHITECTURES[os.uname().machine][0], []
    for name, number in zip(words[::3], words[place::3], strict=True):
        if number != "-":
            rules = RULES.get(name, []) if itself is None else [(0, [itself])]
            then = [each for rule in rules for each in must_be(*rule)] + [step(RETURN, 0, 0, ALLOWED)]
            steps += [step(EQUAL, 0, len(then), int(number)), *then]
    return b"".join(steps)


def allowed_calls(listed: bytes) -> bytes:
    """Return a seccomp filter that allows the listed calls, and refuses other calls and architectures.

    Args:
        listed: the instructions for `CALLS`.
    """
    refuse, (_, architecture) = step(RETURN, 0, 0, REFUSED), ARCHITECTURES[os.uname().machine]
    first = [step(LOAD, 0, 0, 4), step(EQUAL, 1, 0, architecture), refuse, step(LOAD, 0, 0, 0)]
    last = [step(AT_LEAST, 0, 2, FIRST_COMMON), step(AT_LEAST, 1, 0, 1 << 30), step(RETURN, 0, 0, NOT_THERE)]
    return b"".join([*first, let_through(TO_ITSELF, os.getpid()), listed, *last, refuse])


def confine(
    listed: bytes, seconds: int, memory: int, file: int, files: int, processes: int = 0, user: int = 0
) -> None:
    """Apply the limits to this process and all processes that it starts.

    Args:
        listed: the filter instructions for `CALLS`.
        seconds: CPU time, in seconds.
        memory: address space, in bytes.
        file: maximum file size, in bytes.
        files: number of open files.
        processes: number of processes; 0 leaves this limit to the sandbox.
        user: user ID to switch to; 0 keeps the current user.

    Raises:
        OSError: the kernel refuses one of the limits.
    """
    # With limit 0, a system program for core dumps still gets them; with limit 1 it does not. If the kernel
    # refuses limit 1, the limit is 0 already.
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
    if user:  # switch from root, because the kernel does not apply the process limit to root
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if call("capset", packed(4, LINUX_CAPABILITY_VERSION_3, 0), bytes(24)):
        raise OSError("capabilities cannot be given up")
    filters = allowed_calls(listed)
    address = id(filters) + bytes.__basicsize__ - 1  # CPython stores the content of a bytes object here
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, packed(8, len(filters) // 8, address)):
        raise OSError("system calls cannot be filtered")


def keep_apart(folder: str) -> None:
    """Confine this process further, inside the sandbox of the process that it was forked from.

    Afterwards, this process can change files only in its `box` folder, and can send signals only to processes
    that it starts.

    Args:
        folder: the folder of the run, which contains `box`.

    Raises:
        OSError: the kernel refuses the restriction.
    """
    rules = call("syscall", LANDLOCK_CREATE_RULESET, packed(8, WRITES, 0, SIGNALS_AND_SOCKETS), 24, 0)
    refused = rules < 0
    for path, rights in ((f"{folder}/box", WRITES), ("/dev/null", FILE_WRITES)):
        rule = packed(8, rights) + packed(4, os.open(path, os.O_PATH))
        refused |= call("syscall", LANDLOCK_ADD_RULE, rules, PATH_BENEATH, rule, 0) != 0
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if refused or call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0):
        raise OSError("a run cannot be isolated from other runs")


def wait(parent: str) -> list[str]:
    """Fork a process for each line of standard input, and return the line's arguments in that process.

    The output of the new process goes to the pipes in its folder. After each process, this writes to standard
    output how the process ended, and whether it left other processes behind.

    Args:
        parent: the folder that contains the folders of the runs.
    """
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for name in KNOWN:
        __import__(name)
    gc.freeze()  # so that a forked process, when it ends, collects only its own objects
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
        except ChildProcessError:  # all processes have ended
            pass
        os.write(1, f"{code}{left}".encode())
    os._exit(0)


if __name__ == "__main__":
    folder, *limits = sys.argv[1:]
    listed = let_through(CALLS)  # computed before waiting, because it takes a tenth of the time of a run
    if not limits:
        folder, *limits = wait(folder)
    confine(listed, *map(int, limits))
    os.dup2(os.open(f"{folder}/stdin.txt", os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", errors=sys.stdin.errors, closefd=False)  # noqa: SIM115  the old object describes another file
    with open(f"{folder}/program.py", encoding="utf-8") as file:
        program = compile(file.read(), "program.py", "exec", dont_inherit=True)
    os.closerange(3, 64)
    sys.argv = ["program.py"]
    exec(program, {"__name__": "__main__", "__builtins__": __builtins__})
