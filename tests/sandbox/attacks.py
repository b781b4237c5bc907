# ruff: noqa: E501  (programs are data)
"""Programs that attack their sandbox, or cause harm by accident.

Each program prints ESCAPED if the attack succeeded. Effects without output are observed from outside. The
placeholders in {braces} are the names of the targets that the test sets up.
"""

from __future__ import annotations

LIBC = "import ctypes; C = ctypes.CDLL(None, use_errno=True)\n"
TRIED = (
    "import os, sys\n" + LIBC + "r = ctypes.create_string_buffer(256)\n"
    "def t(*call):\n"
    "    if C.syscall(*call) >= 0 or ctypes.get_errno() not in (1, 38): print('ESCAPED', call, ctypes.get_errno())\n"
)
"""Defines t, which makes a system call that must be refused before the kernel looks at the arguments."""
ACL = (
    "import struct; acl = struct.pack('<I', 2) + b''.join(struct.pack('<HHI', k, 7, 2**32 - 1) for k in (1, 4, 32))\n"
    "kept = ctypes.create_string_buffer(acl); v = struct.pack('QII', ctypes.addressof(kept), len(acl), 0)\n"
)
"""Defines an access list with all rights for everyone, and the arguments of setxattrat that set it."""

REFUSED = {  # programs that must fail immediately
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
    "another's memory by a call": LIBC + "b = ctypes.create_string_buffer(64); print('ESCAPED' if C.syscall(310, {pid}, b, 1, b, 1, 0) > 0 else '')",
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
    "truncate a file": "import os\nfor f, *a in (os.truncate, '{target}', 0), (os.open, '{target}', os.O_TRUNC), "
    "(os.open, '../program.py', os.O_TRUNC):\n    try: f(*a); print('ESCAPED')\n    except OSError: pass",
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
    "the parent's memory by a call": LIBC + "import os; b = ctypes.create_string_buffer(8)\nv = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8)\n"
    "for f in C.process_vm_readv, C.process_vm_writev:\n    if f(os.getppid(), v, 1, v, 1, 0) > 0: print('ESCAPED')",
    "write to the folder of all runs": "open('../../x', 'w').write('x'); print('ESCAPED')",
    "many processes": "import os, time\ntry:\n    for n in range(40):\n        if os.fork() == 0: time.sleep(9)\n"
    "    print('ESCAPED')\nexcept OSError: pass",
    "secret memory": LIBC + "print('ESCAPED' if C.syscall(447, 0) >= 0 else '')",
    "namespaces": LIBC + "for f in 0x20000, 0x10000000, 0x40000000:\n    if C.unshare(f) == 0: print('ESCAPED')",
    "a namespace by a fork": LIBC + "print('ESCAPED' if C.syscall(56, 0x10000011, 0, 0, 0, 0) >= 0 else '')",
    "mount": LIBC + "print('ESCAPED' if C.mount(b'x', b'.', b'tmpfs', 0, 0) == 0 else '')",
    "change the root": "import os; os.chroot('/'); print('ESCAPED')",
    "a user namespace": LIBC + "print('ESCAPED' if C.unshare(0x10020000) == 0 and C.mount(b'x', b'.', b'tmpfs', 0, 0) == 0 else '')",
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
    "load into the kernel": LIBC + "print('ESCAPED' if C.syscall(321, 0, ctypes.create_string_buffer(72), 72) >= 0 else '')",
    "the kernel's keys": LIBC + "print('ESCAPED' if C.syscall(248, b'user', b'x', b'x', 1, -3) >= 0 else '')",
    "shared memory by a number": LIBC + "print('ESCAPED' if C.shmget(7, 4096, 0o1666) >= 0 else '')",
    "outlive by a control call": "import ctypes; ctypes.CDLL(None).prctl(1, 0); import os; os.kill({pid}, 9)",
    "inherited files": "import os\nfor f in range(3, 999):\n    try: os.write(f, b'x'); print('ESCAPED')\n    except OSError: pass",
    "a file without a name": "import os; os.open('.', os.O_TMPFILE | os.O_RDWR); print('ESCAPED')",
    "a file without a name by an old call": LIBC + "print('ESCAPED' if C.syscall(2, b'.', 0o20200002, 0o600) >= 0 else '')",
    "blocks without writing": "import os; f = os.open('a', 66); os.posix_fallocate(f, 0, 1 << 40); print('ESCAPED')",
    "a large file": "f = open('a', 'wb')\nfor _ in range(200): f.write(bytes(1 << 20))\nprint('ESCAPED')",
    "a huge sparse file": "f = open('a', 'wb'); f.truncate(1 << 40); print('ESCAPED')",
    "more memory": "x = bytearray(3 << 30); print('ESCAPED')",
    "more memory by maps": "import mmap; m = [mmap.mmap(-1, 1 << 28) for _ in range(9)]; print('ESCAPED')",
    "recursion": "def f(): f()\nf(); print('ESCAPED')",
    "recursion beyond the stack": "import sys; sys.setrecursionlimit(10**9)\nclass A:\n"
    "    def __getattr__(s, n): return getattr(s, n)\nA().x; print('ESCAPED')",
    "inherited files with high numbers": "import os\nfor f in range(3, 2000):\n    try: os.fstat(f); print('ESCAPED')\n    except OSError: pass",
    "a pair of sockets that sends elsewhere": "import socket\nfor kind in 2, 5:\n"
    "    try: a, b = socket.socketpair(1, kind); a.sendto(b'x', '{datagrams}'); print('ESCAPED')\n    except OSError: pass",
    "a stream that sends elsewhere": "import socket; a, b = socket.socketpair(); a.sendto(b'x', '{unix}'); print('ESCAPED')",
    "connect a pair of sockets": "import socket; a, b = socket.socketpair(); a.connect('{unix}'); print('ESCAPED')",
    "an access list by a new call": LIBC + ACL + "C.syscall(463, -100, b'{target}', 0, b'system.posix_acl_access', v, 16)",
    "an access list": LIBC + ACL + "C.setxattr(b'{target}', b'system.posix_acl_access', acl, len(acl), 0)",
    "attributes by new calls": TRIED + ACL + "f = os.open(os.__file__, 0)\nfor p in b'{target}', b'../program.py':\n"
    "    t(463, -100, p, 0, b'user.x', v, 16); t(464, -100, p, 0, b'user.x', v, 16); t(465, -100, p, 0, r, 64)\n"
    "    t(466, -100, p, 0, b'user.x'); t(468, -100, p, r, 24, 0); t(469, -100, p, bytes(24), 24, 0)\n"
    "    t(191, p, b'user.x', r, 64); t(194, p, r, 64); t(188, p, b'user.x', b'', 0, 0); t(189, p, b'user.x', b'', 0, 0)\n"
    "    t(197, p, b'user.x'); t(198, p, b'user.x'); t(452, -100, p, 0o777, 0); t(90, p, 0o777); t(268, -100, p, 0o777)\n"
    "    t(92, p, -1, -1); t(94, p, -1, -1); t(260, -100, p, -1, -1, 0); t(280, -100, p, 0, 0); t(132, p, 0)\n    t(235, p, 0); t(261, -100, p, 0)\n"
    "t(190, f, b'user.x', b'', 0, 0); t(199, f, b'user.x'); t(91, f, 0o777); t(93, f, -1, -1); t(280, f, 0, 0, 0)",
    "requests to devices and file systems": TRIED + "files = [0, 1, os.open('../program.py', 0), os.open(os.__file__, 0), os.open('/dev/null', 2)]\n"
    "for f in files:\n    for n in (0x40086602, 0x80086601, 0x401C5820, 0x801C581F, 0x40087602, 0x80087601, 0xC0189436, 0x40049409, 0xC020660B,\n"
    "              0xC0045877, 0xC0045878, 0xC0185879, 1, 2, 0x5452, 0x541B, 0x5412, 0x541C, 0x540E, 0x5413, 0x5402, 0x8901,\n"
    "              0x1260, 0x6601, 0x2400, 0x800C6613, 0x40106614, 0xAA, 0xB701, 0x40085890, 0x5408, 0x5460):\n        t(16, f, n, r)",
    "watch names": TRIED + "t(253); t(294, 0); t(254, 1, b'/tmp', 0x100); t(255, 1, 1); t(300, 0, 0); t(300, 0x200, 0); t(301, 1, 1, 2, -100, b'/tmp')",
    "links of processes": "import os\nfor p in '{pid}', os.getppid(), 'self', 1:\n    for n in 'cwd', 'exe', 'root', 'ns/pid', 'fd/0', 'fd/1':\n"
    "        try: os.readlink(f'/proc/{{p}}/{{n}}'); print('ESCAPED')\n        except OSError: pass",
    "read links": TRIED + "t(89, b'/proc/self', r, 64); t(267, -100, b'/proc/self', r, 64)",
    "files by other ways": TRIED + "t(303, -100, b'/etc', r, r, 0); t(304, -100, r, 0); t(437, -100, b'/etc/passwd', bytes(24), 24)\n"
    "for flags in 0o10000000, 0o10200000, 0o20200002, 0o20000, 0o1000000: t(257, -100, b'.', flags)\n"
    "t(2, b'../program.py', 0); t(85, b'x', 0o600); t(76, b'{target}', 0); t(332, -100, b'/etc', 0, 0xFFF, r); t(21, b'/etc', 4)\n"
    "t(269, -100, b'/etc', 4); t(439, -100, b'/etc', 4, 0); t(80, b'/etc'); t(81, 0); t(137, b'/', r); t(138, 0, r)\n"
    "t(86, b'{secret}', b'h'); t(265, -100, b'{secret}', -100, b'h', 0); t(88, b'{secret}', b'l'); t(266, b'{secret}', -100, b'l')\n"
    "t(133, b'd', 0o60600, 259); t(259, -100, b'd', 0o10600, 0); t(84, b'{outside}'); t(87, b'{target}'); t(263, -100, b'{target}', 0)\n"
    "t(82, b'{target}', b'x'); t(264, -100, b'{target}', -100, b'x'); t(316, -100, b'{target}', -100, b'x', 2)",
    "file systems": TRIED
    + "t(428, -100, b'/', 1); t(467, -100, b'/', 1, 0, 0); t(429, -100, b'.', -100, b'x', 0); t(430, b'tmpfs', 0); t(431, 0, 6, 0, 0, 0)\n"
    "t(432, 0, 0, 0); t(433, -100, b'/', 0); t(442, -100, b'/', 0, bytes(32), 32); t(165, b'x', b'.', b'tmpfs', 0, 0); t(166, b'.', 0)\n"
    "t(155, b'.', b'.'); t(161, b'/'); t(457, r, r, 64, 0); t(458, r, r, 8, 0); t(470, 0, 0, 0); t(179, 0x800007, b'/', 0, r)\n"
    "t(443, 0, 0x800007, 0, r); t(167, b'x', 0); t(168, b'x'); t(163, b'x')",
    "other processes": TRIED + "for p in {pid}, os.getppid():\n"
    "    t(434, p, 0); t(101, 16, p, 0, 0); t(310, p, r, 1, r, 1, 0); t(311, p, r, 1, r, 1, 0); t(312, os.getpid(), p, 0, 1, 1)\n"
    "    t(298, bytes(128), p, -1, -1, 0); t(279, p, 0, 0, 0, 0, 0); t(256, p, 64, r, r); t(274, p, r, r); t(203, p, 8, r); t(204, p, 128, r)\n"
    "    t(144, p, 0, bytes(4)); t(142, p, bytes(4)); t(143, p, r); t(145, p); t(148, p, r); t(314, p, bytes(48), 0); t(315, p, r, 48, 0)\n"
    "    t(251, 1, p, 0x4000); t(252, 1, p); t(141, 0, p, 19); t(140, 0, p); t(302, p, 7, 0, r); t(302, p, 0, bytes(16), 0); t(121, p); t(124, p)\n"
    "    t(109, p, 0); t(157, 62, 0, p, 0, r); t(157, 62, 2, p, 0, 0); t(247, 1, p, r, 4, 0)\n"
    "t(438, 0, 0, 0); t(424, 0, 0, 0, 0); t(440, 0, r, 1, 4, 0); t(448, 0, 0); t(272, 0x20000); t(308, 0, 0)",
    "signals by other ways": TRIED + "for p in {pid}, os.getppid():\n"
    "    for s in 0, 10, 9: t(62, p, s); t(62, -p, s); t(200, p, s); t(234, p, p, s); t(129, p, s, bytes(128)); t(297, p, p, s, bytes(128))\n"
    "t(62, 0, 0); t(62, -1, 0); t(62, 1, 0); t(112); t(109, 0, 0)",
    "locks, leases and notices": TRIED + "for f in os.open(os.__file__, 0), os.open('../program.py', 0), os.open(os.path.dirname(os.__file__), 0):\n"
    "    for n in 1024, 1025, 1026, 5, 6, 7, 36, 37, 38, 8, 9, 10, 11, 15, 16, 1031, 1032, 1033, 1034, 1035, 1036, 1037, 1038, 1039, 1040, 1041, 1042: t(72, f, n, r)\n"
    "    for n in 1, 2, 5, 6: t(73, f, n)\n"
    "    t(74, f); t(75, f); t(306, f); t(277, f, 0, 0, 7); t(221, f, 0, 0, 4); t(187, f, 0, 4096); t(451, f, r, r, 0); t(285, f, 0, 0, 9)\nt(162)",
    "work by rings and queues": TRIED
    + "t(425, 8, ctypes.create_string_buffer(120)); t(426, 0, 0, 0, 0, 0); t(427, 0, 0, 0, 0); t(206, 8, r); t(207, 0); t(209, 0, 0, 0)",
    "the kernel itself": TRIED
    + "t(321, 0, bytes(72), 72); t(323, 1); t(250, 0, -3, 0); t(248, b'user', b'x', b'x', 1, -3); t(249, b'user', b'x', 0, -3)\n"
    "t(444, 0, 0, 1); t(445, 0, 1, r, 0); t(446, 0, 0); t(317, 1, 8, bytes(16)); t(317, 2, 0, r); t(103, 10, 0, 0); t(103, 3, r, 64); t(169, 0, 0, 0, 0)\n"
    "t(170, b'x', 1); t(171, b'x', 1); t(135, 0xFFFFFFFF); t(135, 0x40000); t(172, 3); t(173, 0, 8, 1); t(175, 0, 0, 0); t(176, b'x', 0); t(313, 0, b'', 0)\n"
    "t(246, 0, 0, 0, 0); t(320, 0, 0, 0, 0, 0); t(153); t(154, 0, r, 64); t(159, bytes(208)); t(227, 0, bytes(16)); t(305, 0, bytes(208)); t(164, 0, 0)\n"
    "t(459, 100, r, r, 0); t(460, 100, r, 8, 0); t(461, r, r, 0); t(453, 0, 4096, 0); t(212, 0, r, 8); t(324, 0, 0, 0); t(102 + 3, 0)\n"
    "for n in 1, 2, 3, 4, 8, 15, 22, 23, 24, 28, 35, 36, 38, 41, 47, 53, 59, 63, 65, 0x53564D41, 0x59616D61: t(157, n, 0, 0, 0, 0)",
    "memory of all": TRIED
    + "t(29, 7, 4096, 0o1666); t(30, 0, 0, 0); t(31, 0, 2, r); t(31, 0, 13, r); t(31, 0, 14, r); t(64, 7, 1, 0o1666); t(66, 0, 0, 2, r); t(65, 0, r, 1)\n"
    "t(68, 7, 0o1666); t(69, 0, r, 1, 0); t(70, 0, r, 1, 0, 0); t(71, 0, 2, r); t(240, b'tandem', 0o102, 0o600, 0); t(241, b'tandem'); t(319, b'x', 0); t(447, 0)\n"
    "t(99, r); t(309, r, r, 0); t(149, r, 64); t(151, 1); t(325, r, 64, 1); t(238, 1, r, 8); t(239, r, 0, 0, 0, 0); t(237, r, 4096, 0, 0, 0, 0); t(450, r, 4096, 0, 0)\n"
    "t(27, r, 4096, r); t(26, r, 4096, 4); t(9, 0, 1 << 21, 3, 0x40022, -1, 0); t(9, 0, 4096, 3, 0x2022, -1, 0); t(216, r, 4096, 0, 0, 0); t(330, 0, 0)\n"
    "for n in 8, 9, 10, 12, 14, 20, 21, 22, 100, 101: t(28, r, 4096, n)",
    "wake others": TRIED + "import mmap; f = os.open(os.__file__, 0); m = ctypes.create_string_buffer(8)\n"
    "for n in 1, 3, 4, 5, 6, 7, 10, 11, 12, 13, 130, 134, 138, 139: t(202, m, n, 1, 0, 0, 0)\n"
    "t(454, m, -1, 1, 2); t(455, m, 1, -1, 2, 0, 0); t(449, r, 1, 0, 0, 0); t(456, r, 0, 1, 1)",
    "data between files": TRIED + "t(40, 1, 0, 0, 1); t(275, 0, 0, 1, 0, 1, 0); t(276, 0, 1, 1, 0); t(278, 1, r, 1, 0); t(326, 0, 0, 1, 0, 1, 0)\n"
    "for n in 0x80, 0x4000: t(293, r, n)",
    "sockets of every kind": TRIED + "for f in range(46): t(41, f, 1, 0); t(41, f, 3, 0)\nfor f in range(2, 46): t(53, f, 1, 0, r)\n"
    "for k in 2, 3, 5: t(53, 1, k, 0, r)\nfor n in 42, 43, 46, 47, 48, 49, 50, 52, 54, 55, 288, 299, 307: t(n, 0, r, r, 0, 0, 0)",
    "the clocks of another": "import time\nfor p in {pid}, 1:\n    for k in 0, 1, 2:\n        for f in time.clock_gettime, time.clock_getres:\n"
    "            try: f((~p << 3) | k); print('ESCAPED')\n            except OSError: pass",
    "clocks and timers": TRIED + "for c in (~{pid} << 3) | 2, ~0 << 3 | 3, 12, 16, 23: t(228, c, r); t(229, c, r); t(230, c, 0, bytes(16), 0)\n"
    "t(222, 0, 0, r); t(283, 0, 0); t(226, 0); t(282, -1, r, 8); t(289, -1, r, 8, 0)",
    "another program": TRIED + "a = (ctypes.c_char_p * 5)(b'python', b'-S', b'-c', b'print(\"ESCAPED\")'); e = (ctypes.c_char_p * 1)()\n"
    "f = os.open(sys.executable, 0); t(322, f, b'', a, e, 0x1000)\n"
    "t(322, -100, os.fsencode(sys.executable), a, e, 0); t(59, os.fsencode(sys.executable), a, e)",
    "a sibling of the process": TRIED
    + "for f in 0x8011, 0x1011, 0x2011, 0x800011, 0x80000011, 0x10000011, 0x20000011, 0x40000011, 0x4000011, 0x2000011, 0x8000011, 0x91:\n    t(56, f, 0, 0, 0, 0)\n"
    "t(57); t(58); t(435, bytes(64), 64); t(272, 0x400)",
    "calls of x32": TRIED + "for n in 0, 2, 39, 41, 188, 512, 520, 545: t(0x40000000 + n, 0, 0, 0)",
    "calls of 32 bits": TRIED + "import mmap; m = mmap.mmap(-1, 4096, prot=7); m.write(bytes.fromhex('b814000000cd80c3'))\n"
    "n = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\nprint('ESCAPED' if n > 0 else '')",
    "every call that is not listed": TRIED
    + "for n in sorted({{*range(3000)}} - {{*{listed}}} - {{335, 336}}): t(n, 0, 0, 0, 0, 0, 0)",  # 335 and 336 are internal to the kernel
    "a crash": "import ctypes; ctypes.string_at(0); print('ESCAPED')",
    "a crash that can be dumped": "import resource as r; r.setrlimit(r.RLIMIT_CORE, (0, 0)); print('ESCAPED')",
    "abort": "import os; os.abort(); print('ESCAPED')",
    "kill itself": "import os; os.kill(os.getpid(), 9); print('ESCAPED')",
}  # fmt: skip
FOREVER = "while True: "
LIMITED = {  # programs that run until a limit stops them, with the limit
    "an endless loop": (FOREVER + "pass", "timeout"),
    "sleep": ("import time; time.sleep(999)", "timeout"),
    "wait for a pipe": ("import os; r, w = os.pipe(); os.read(r, 1)", "timeout"),
    "ignore signals": ("import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass", "timeout"),
    "stop itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "arithmetic that nothing interrupts": ("x = 9; print(x ** x ** x)", "timeout"),
    "a regular expression": ("import re; re.match('(a+)+$', 'a' * 64 + 'b')", "timeout"),
    "a fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
    "a bomb of threads": ("import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
        "    except RuntimeError: pass", "timeout"),
    "a deadlock": ("import threading; l = threading.Lock(); l.acquire(); l.acquire()", "timeout"),
    "an alarm to come": ("import signal, time; signal.alarm(60); time.sleep(99)", "timeout"),
    "flood of output": (FOREVER + "print('x' * 9999)", "output"),
    "flood of errors": ("import sys\nwhile True: sys.stderr.write('x' * 9999)", "output"),
    "flood from a child": ("import os, time\nif os.fork() == 0:\n    while True: print('x' * 9999)\ntime.sleep(99)", "output"),
    "many files": ("for i in range(10**7): os.close(os.open(str(i), 66))".join(["import os\n", ""]), "disk"),
    "files that fill the disk": ("for i in range(10**7):\n    with open(str(i), 'wb') as f: f.write(bytes(15 << 20))", "disk"),
    "folders without end": ("import os\np = '.'\nwhile True:\n    p += '/a'\n    try: os.mkdir(p)\n    except OSError: pass", "disk"),
}  # fmt: skip
LEFT_BEHIND = {  # programs that end immediately and must leave no process behind
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
    "a thread that stays": "import os, threading, time\nthreading.Thread(target=time.sleep, args=(999,)).start(); os._exit(0)",
    "kill all": "import os, signal; signal.signal(15, 1); os.kill(-1, 15)",
    "a folder that none may read": "import os; os.mkdir('a'); open('a/x', 'w'); os.mkdir('a/b', 0)",
}  # fmt: skip
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
"""MARKING leaves traces, LOOKING prints everything in which a later run could see them."""
