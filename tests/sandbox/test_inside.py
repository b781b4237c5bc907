"""The system call filter, executed step by step like in the kernel, for both architectures."""

import os
import struct
from types import SimpleNamespace

import pytest

from tandem.sandbox import inside

CALLS = f"{inside.CALLS} {inside.TO_ITSELF}".split()
GOOD = {
    "openat": (0, 0, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC),
    "fcntl": (1, 3), "ioctl": (1, 0x5401), "socketpair": (1, 0x80001), "mmap": (0, 4096, 3, 0x22),
    "madvise": (0, 0, 4), "futex": (0, 129), "clone": (0x1200011,), "kill": (os.getpid(), 9),
    "tgkill": (os.getpid(), 1, 9),
}  # fmt: skip
"""Arguments with which a call is allowed; the other calls need none."""
BAD: dict[str, list[tuple[int, ...]]] = {
    "openat": [(0, 0, 0o10000000), (0, 0, 0o20200002), (0, 0, 0o1000000)],
    "fcntl": [(1, n) for n in (6, 8, 1024, 1026, 1031, 2**32 - 1)],
    "ioctl": [(1, n) for n in (0x40086602, 0x5412, 0xC0189436, 0x5452)],
    "pipe2": [(0, 0x80)],
    "socketpair": [(2, 1), (1, 2), (1, 5), (1, 0x80002)],
    "sendto": [(0, 0, 0, 0, 1), (0, 0, 0, 0, 1 << 32)],
    "mmap": [(0, 4096, 3, 0x40022), (0, 4096, 3, 1 << 32 | 2)],
    "madvise": [(0, 0, 12), (0, 0, 100)], "futex": [(0, 1), (0, 7)],
    "clone": [(flags,) for flags in (0x8011, 0x1011, 0x20011, 0x10000011, 0x40000011, 0x80000011)],
    "kill": [(pid, 9) for pid in (0, 1, os.getppid(), 2**64 - 1, 2**32 - os.getpid())],
    "tgkill": [(os.getppid(), os.getpid(), 9)],
    "clock_gettime": [(2**32 - 6,), (12,)], "clock_getres": [(2**32 - 6,)], "clock_nanosleep": [(2**32 - 6,)],
    "prlimit64": [(os.getpid(), 7), (1, 7), (0, 4)],
    "sched_getaffinity": [(1,)],
}  # fmt: skip


def verdict(filters, architecture, number, *arguments):
    """Return what the filter decides about a system call."""
    words = (*arguments, *(6 - len(arguments)) * (0,))
    data, at, value = struct.pack("=IIQ6Q", number, architecture, 0, *words), 0, 0
    while True:
        code, if_so, if_not, constant = struct.unpack_from("=HBBI", filters, 8 * at)
        if code == inside.RETURN:
            return int(constant)
        at += 1
        if code == inside.LOAD:
            (value,) = struct.unpack_from("=I", data, constant)
            continue
        tests = {inside.EQUAL: value == constant, inside.AT_LEAST: value >= constant}
        at += if_so if tests.get(code, bool(value & constant)) else if_not


@pytest.fixture(params=inside.ARCHITECTURES)
def machine(request, monkeypatch):
    place, architecture = inside.ARCHITECTURES[request.param]
    monkeypatch.setattr(inside.os, "uname", lambda: SimpleNamespace(machine=request.param))
    pairs = zip(CALLS[::3], CALLS[place::3], strict=True)
    return SimpleNamespace(
        numbers={name: int(number) for name, number in pairs if number != "-"},
        architecture=architecture,
        filters=inside.allowed_calls(inside.let_through(inside.CALLS)),
    )


def test_what_is_listed_is_let_through_and_nothing_else(machine):
    names = {number: name for name, number in machine.numbers.items()}
    assert len(names) == len(machine.numbers)
    for number in (*range(3000), 2**31, 2**32 - 1):
        found = verdict(machine.filters, machine.architecture, number, *GOOD.get(names.get(number, ""), ()))
        others = inside.NOT_THERE if 403 <= number < 2**30 else inside.REFUSED
        assert found == (inside.ALLOWED if number in names else others), number


def test_calls_of_other_architectures_are_refused(machine):
    others = {0x40000003, 0x40000028, 0xC000003E, 0xC00000B7, 0} - {machine.architecture}
    for name, number in machine.numbers.items():
        for architecture in others:
            assert verdict(machine.filters, architecture, number, *GOOD.get(name, ())) == inside.REFUSED
        x32 = verdict(machine.filters, machine.architecture, number | 1 << 30, *GOOD.get(name, ()))
        assert x32 == inside.REFUSED


def test_arguments_decide(machine):
    assert set(BAD) == {*inside.RULES, "kill", "tgkill"}
    for name, calls in BAD.items():
        for arguments in calls:
            found = verdict(machine.filters, machine.architecture, machine.numbers[name], *arguments)
            assert found == inside.REFUSED, (name, arguments)
