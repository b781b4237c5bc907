# ruff: noqa: E501  (programs are data)
"""Programs that attack what runs them, or do it harm by accident. Each prints ESCAPED where it got through; what
they can do without printing is looked at from outside. {names} are those of the field that the test lays out."""

from __future__ import annotations

LIBC = "import ctypes; C = ctypes.CDLL(None, use_errno=True)\n"

REFUSED = {  # what must come to nothing, at once
    "connect to a TCP port": "import socket; socket.create_connection(('127.0.0.1', {tcp})); print('ESCAPED')",
    "listen at a TCP port": "import socket; socket.create_server(('127.0.0.1', 0)); print('ESCAPED')",
    "send a UDP packet": "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {udp})); print('ESCAPED')",
    "look up a name": "import socket; socket.getaddrinfo('example.org', 80); print('ESCAPED')",
    "connect to a socket file": "import socket; socket.socket(1).connect('{unix}'); print('ESCAPED')",
    "an abstract socket": "import socket; socket.socket(1).connect('\\0{abstract}'); print('ESCAPED')",
    "send to a socket file": "import socket; socket.socket(1, 2).sendto(b'x', '{unix}'); print('ESCAPED')",
    "netlink": "import socket; socket.socket(16, 3, 0); print('ESCAPED')",
    "raw packets": "import socket; socket.socket(17, 3, 0); print('ESCAPED')",
    "IPv6": "import socket; socket.socket(10, 1).connect(('::1', {tcp})); print('ESCAPED')",
    "vsock": "import socket; socket.socket(40, 1); print('ESCAPED')",
    "socket by the C library": LIBC + "print('ESCAPED' if C.socket(2, 1, 0) >= 0 else '')",
    "download": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{tcp}/'); print('ESCAPED')",
    "io_uring": LIBC + "print('ESCAPED' if C.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0 else '')",
    "read the accounts": "open('/etc/passwd').read(); print('ESCAPED')",
    "read a secret of the user": "open('{secret}').read(); print('ESCAPED')",
    "list the home of root": "import os, sys\nfor name in os.listdir('/root'):\n"
    "    if not sys.base_prefix.startswith(os.path.join('/root', name)): print('ESCAPED')",
    "list a folder of the user": "import os; os.listdir(os.path.dirname('{secret}')); print('ESCAPED')",
    "the parent's environment": "import os; open(f'/proc/{{os.getppid()}}/environ').read(); print('ESCAPED')",
    "the parent's memory": "import os; open(f'/proc/{{os.getppid()}}/mem', 'rb'); print('ESCAPED')",
    "a variable of the parent": "import os\nif '{variable}' in str(os.environ): print('ESCAPED')",
    "another's open files": "import os; os.listdir('/proc/{pid}/fd'); print('ESCAPED')",
    "another's memory by a call": LIBC
    + "b = ctypes.create_string_buffer(64); print('ESCAPED' if C.syscall(310, {pid}, b, 1, b, 1, 0) > 0 else '')",
    "read by a symlink": "import os; os.symlink('{secret}', 'l'); open('l').read(); print('ESCAPED')",
    "read by a hard link": "import os; os.link('{secret}', 'h'); open('h').read(); print('ESCAPED')",
    "write by a symlink": "import os; os.symlink('{outside}/a', 'l'); open('l', 'w').write('x'); print('ESCAPED')",
    "write beside the folder": "open('../x', 'w').write('x'); print('ESCAPED')",
    "write to a folder for all": "open('{outside}/a', 'w').write('x'); print('ESCAPED')",
    "make a folder": "import os; os.mkdir('{outside}/a'); print('ESCAPED')",
    "write to shared memory": "open('/dev/shm/{variable}', 'w').write('x'); print('ESCAPED')",
    "a named semaphore": "import multiprocessing as m; m.Lock(); print('ESCAPED')",
    "memory as a file": "import os; os.memfd_create('x'); print('ESCAPED')",
    "remove a file": "import os; os.remove('{target}'); print('ESCAPED')",
    "rename a file": "import os; os.rename('{target}', '{outside}/a'); print('ESCAPED')",
    "truncate a file": "import os; os.truncate('{target}', 0); print('ESCAPED')",
    "change a file's mode": "import os; os.chmod('{target}', 0o777); print('ESCAPED')",
    "change a file's owner": "import os; os.chown('{target}', 1, 1); print('ESCAPED')",
    "change a file's times": "import os; os.utime('{target}', (1, 1)); print('ESCAPED')",
    "change a file's attributes": "import os; os.setxattr('{target}', 'user.x', b'x'); print('ESCAPED')",
    "change its own text": "open('../program.py', 'w').write('x'); print('ESCAPED')",
    "a device": "import os; os.mknod('d', 0o60600, 259); print('ESCAPED')",
    "kill the parent": "import os, signal; os.kill(os.getppid(), 9)",
    "kill another": "import os; os.kill({pid}, 9); print('ESCAPED')",
    "kill a group": "import os; os.killpg({pid}, 9); print('ESCAPED')",
    "signal by a handle": "import os, signal; signal.pidfd_send_signal(os.pidfd_open({pid}), 9); print('ESCAPED')",
    "trace another": LIBC + "print('ESCAPED' if C.ptrace(16, {pid}, 0, 0) == 0 else '')",
    "leave the group": "import os\nif os.fork() == 0: os.setsid(); print('ESCAPED')\nelse: os.wait()",
    "trace the parent": LIBC + "import os; print('ESCAPED' if C.ptrace(16, os.getppid(), 0, 0) == 0 else '')",
    "the parent's memory by a call": LIBC + "import os; b = ctypes.create_string_buffer(8)\n"
    "v = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8)\n"
    "for f in C.process_vm_readv, C.process_vm_writev:\n"
    "    if f(os.getppid(), v, 1, v, 1, 0) > 0: print('ESCAPED')",
    "write to the folder of all runs": "open('../../x', 'w').write('x'); print('ESCAPED')",
    "many processes": "import os, time\ntry:\n    for n in range(40):\n        if os.fork() == 0: time.sleep(9)\n"
    "    print('ESCAPED')\nexcept OSError: pass",
    "secret memory": LIBC + "print('ESCAPED' if C.syscall(447, 0) >= 0 else '')",
    "namespaces": LIBC
    + "for f in 0x20000, 0x10000000, 0x40000000:\n    if C.unshare(f) == 0: print('ESCAPED')",
    "a namespace by a fork": LIBC + "print('ESCAPED' if C.syscall(56, 0x10000011, 0, 0, 0, 0) >= 0 else '')",
    "mount": LIBC + "print('ESCAPED' if C.mount(b'x', b'.', b'tmpfs', 0, 0) == 0 else '')",
    "change the root": "import os; os.chroot('/'); print('ESCAPED')",
    "a user namespace": LIBC
    + "print('ESCAPED' if C.unshare(0x10020000) == 0 and C.mount(b'x', b'.', b'tmpfs', 0, 0) == 0 else '')",
    "another user": "import os\nfor u in {{0, 1, 1000}} - {{os.getuid()}}: os.setuid(u); print('ESCAPED')",
    "root's powers again": LIBC + "import struct; d = struct.pack('6I', *[2**32 - 1] * 6)\n"
    "print('ESCAPED' if C.capset(struct.pack('II', 0x20080522, 0), d) == 0 else '')",
    "a higher limit": "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (1 << 40, 1 << 40)); print('ESCAPED')",
    "another's limit": "import resource as r; r.prlimit({pid}, r.RLIMIT_CPU, (1, 1)); print('ESCAPED')",
    "another's cores": "import os; os.sched_setaffinity({pid}, [0]); print('ESCAPED')",
    "a higher priority": "import os; os.nice(-5); print('ESCAPED')",
    "real-time priority": "import os; os.sched_setscheduler(0, 1, os.sched_param(1)); print('ESCAPED')",
    "another's priority": "import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19); print('ESCAPED')",
    "set the clock": "import time; time.clock_settime(0, time.time()); print('ESCAPED')",
    "set the machine's name": "import socket; socket.sethostname('x'); print('ESCAPED')",
    "load into the kernel": LIBC
    + "print('ESCAPED' if C.syscall(321, 0, ctypes.create_string_buffer(72), 72) >= 0 else '')",
    "the kernel's keys": LIBC + "print('ESCAPED' if C.syscall(248, b'user', b'x', b'x', 1, -3) >= 0 else '')",
    "shared memory by a number": LIBC + "print('ESCAPED' if C.shmget(7, 4096, 0o1666) >= 0 else '')",
    "outlive by a control call": "import ctypes; ctypes.CDLL(None).prctl(1, 0); import os; os.kill({pid}, 9)",
    "inherited files": "import os\nfor f in range(3, 999):\n    try: os.write(f, b'x'); print('ESCAPED')\n"
    "    except OSError: pass",
    "a file without a name": "import os; os.open('.', os.O_TMPFILE | os.O_RDWR); print('ESCAPED')",
    "a file without a name by an old call": LIBC
    + "print('ESCAPED' if C.syscall(2, b'.', 0o20200002, 0o600) >= 0 else '')",
    "blocks without writing": "import os; f = os.open('a', 66); os.posix_fallocate(f, 0, 1 << 40); print('ESCAPED')",
    "a large file": "f = open('a', 'wb')\nfor _ in range(200): f.write(bytes(1 << 20))\nprint('ESCAPED')",
    "a huge sparse file": "f = open('a', 'wb'); f.truncate(1 << 40); print('ESCAPED')",
    "more memory": "x = bytearray(3 << 30); print('ESCAPED')",
    "more memory by maps": "import mmap; m = [mmap.mmap(-1, 1 << 28) for _ in range(9)]; print('ESCAPED')",
    "recursion": "def f(): f()\nf(); print('ESCAPED')",
    "recursion beyond the stack": "import sys; sys.setrecursionlimit(10**9)\nclass A:\n"
    "    def __getattr__(s, n): return getattr(s, n)\nA().x; print('ESCAPED')",
    "a crash": "import ctypes; ctypes.string_at(0); print('ESCAPED')",
    "abort": "import os; os.abort(); print('ESCAPED')",
    "kill itself": "import os; os.kill(os.getpid(), 9); print('ESCAPED')",
}
FOREVER = "while True: "
LIMITED = {  # what goes on until a limit ends it, with the limit
    "an endless loop": (FOREVER + "pass", "timeout"),
    "sleep": ("import time; time.sleep(999)", "timeout"),
    "wait for a pipe": ("import os; r, w = os.pipe(); os.read(r, 1)", "timeout"),
    "ignore signals": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "timeout",
    ),
    "stop itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "arithmetic that nothing interrupts": ("x = 9; print(x ** x ** x)", "timeout"),
    "a regular expression": ("import re; re.match('(a+)+$', 'a' * 64 + 'b')", "timeout"),
    "a fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
    "a bomb of threads": (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
        "    except RuntimeError: pass",
        "timeout",
    ),
    "a deadlock": ("import threading; l = threading.Lock(); l.acquire(); l.acquire()", "timeout"),
    "a lock on a file": (
        "import fcntl\nf = open('a', 'w'); fcntl.flock(f, 2); fcntl.flock(open('a'), 2)",
        "timeout",
    ),
    "an alarm to come": ("import signal, time; signal.alarm(60); time.sleep(99)", "timeout"),
    "flood of output": (FOREVER + "print('x' * 9999)", "output"),
    "flood of errors": ("import sys\nwhile True: sys.stderr.write('x' * 9999)", "output"),
    "flood from a child": (
        "import os, time\nif os.fork() == 0:\n    while True: print('x' * 9999)\ntime.sleep(99)",
        "output",
    ),
    "many files": ("for i in range(10**7): os.close(os.open(str(i), 66))".join(["import os\n", ""]), "disk"),
    "files that fill the disk": (
        "for i in range(10**7):\n    with open(str(i), 'wb') as f: f.write(bytes(15 << 20))",
        "disk",
    ),
    "folders without end": ("import os\nwhile True: os.mkdir('a'); os.chdir('a')", "disk"),
}
LEFT_BEHIND = {  # what ends at once, and must leave nothing that runs
    "a child that stays": "import os, time\nif os.fork() == 0: time.sleep(999)",
    "a child that closes its files": "import os, time\nif os.fork() == 0: os.closerange(0, 99); time.sleep(999)",
    "a daemon": "import os, time\nif os.fork() == 0:\n    try: os.setsid()\n    except OSError: pass\n"
    "    if os.fork() == 0: os.closerange(0, 99); time.sleep(999)",
    "a child in a group of its own": "import os, time\nif os.fork() == 0:\n    try: os.setpgid(0, 0)\n"
    "    except OSError: pass\n    os.closerange(0, 99); time.sleep(999)",
    "a child that ignores signals": "import os, signal, time\nif os.fork() == 0:\n    for s in range(1, 32):\n"
    "        try: signal.signal(s, 1)\n        except OSError: pass\n    os.closerange(0, 99); time.sleep(999)",
    "children that go on forking": "import os\nif os.fork() == 0:\n    os.closerange(0, 99)\n    while True:\n"
    "        try:\n            if os.fork(): os._exit(0)\n        except OSError: pass",
    "zombies": "import os, time\nfor _ in range(6):\n    if os.fork() == 0: os._exit(0)",
    "a thread that stays": "import os, threading, time\n"
    "threading.Thread(target=time.sleep, args=(999,)).start(); os._exit(0)",
    "kill all": "import os, signal; signal.signal(15, 1); os.kill(-1, 15)",
    "a folder that none may read": "import os; os.mkdir('a'); open('a/x', 'w'); os.mkdir('a/b', 0)",
}
MARKING = """
import builtins, json, os, random, sys, threading
open('file', 'w').write('x')
os.environ['MARK'] = 'x'; os.umask(0)
json.dumps = builtins.len = sys.exit; sys.modules['re'] = None; sys.path.append('x'); random.seed(1)
"""
LOOKING = """
import json, os, random, re, sys
print(os.listdir('.'), os.environ.get('MARK'), os.umask(0), json.dumps(len('ab')), re.escape('a'))
print('x' in sys.path, hash('a'), sys.stdin.read(), sys.argv, os.path.basename(os.getcwd()))
print(random.random())
"""
"""What leaves marks, and what would see them in a later run."""
