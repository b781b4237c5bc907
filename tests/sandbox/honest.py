# ruff: noqa: E501  (programs are data)
"""Harmless programs, which a sandbox must not hinder, each with its expected output."""

from __future__ import annotations

HONEST = {
    "output": ("import sys; print(1); sys.stdout.write('é'); sys.stderr.write('x')", "1\né"),
    "files": ("import os\n"
        "with open('a', 'w+') as f: f.write('xyz'); f.seek(1); print(f.read()); f.truncate(1)\n"
        "with open('a', 'ab') as f: f.write(b'1')\n"
        "print(open('a').read(), os.path.getsize('a'), os.path.exists('b'), os.listdir('.'))\n"
        "os.makedirs('d/e'); print(os.path.isdir('d/e'), [d for d, _, _ in os.walk('.')], os.path.basename(os.path.realpath('a')), os.path.abspath('a') == os.getcwd() + '/a')", "yz\nx1 2 False ['a']\nTrue ['.', './d', './d/e'] a True\n"),
    "fork": ("import os\n"
        "r, w = os.pipe()\n"
        "if os.fork() == 0: os.write(w, b'x'); os._exit(3)\n"
        "print(os.read(r, 1), os.waitstatus_to_exitcode(os.wait()[1]))", "b'x' 3\n"),
    "threads": ("import sys, threading\n"
        "sys.setrecursionlimit(10**6); threading.stack_size(64 << 20)\n"
        "def f(n): return n and 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(20000))); t.start(); t.join()", "20000\n"),
    "pool": ("from concurrent.futures import ThreadPoolExecutor as P\n"
        "import time\n"
        "with P(4) as p: print(list(p.map(lambda n: time.sleep(.01) or n, range(6))))", "[0, 1, 2, 3, 4, 5]\n"),
    "conditions": ("import threading, queue\n"
        "q = queue.Queue(); c = threading.Condition(); e = threading.Event()\n"
        "t = threading.Thread(target=lambda: (e.wait(5), q.put(1)))\n"
        "t.start(); e.set(); print(q.get(timeout=5), threading.Lock().acquire(timeout=.01)); t.join()\n"
        "with c: print(c.wait(.01))", "1 True\nFalse\n"),
    "asyncio": ("import asyncio\n"
        "async def f(n): await asyncio.sleep(.01); return n\n"
        "async def g(): return await asyncio.gather(*map(f, range(3)), asyncio.to_thread(lambda: 9))\n"
        "print(asyncio.run(g()))", "[0, 1, 2, 9]\n"),
    "multiprocessing": ("import multiprocessing as m\n"
        "def f(c): c.send([1, 2])\n"
        "a, b = m.Pipe(); p = m.Process(target=f, args=(b,)); p.start(); print(a.recv()); p.join(); print(p.exitcode)", "[1, 2]\n0\n"),
    "signals": ("import signal, time, os\n"
        "seen = []\n"
        "signal.signal(signal.SIGALRM, lambda *a: seen.append(1)); signal.setitimer(signal.ITIMER_REAL, .01); time.sleep(.1)\n"
        "signal.signal(signal.SIGUSR1, lambda *a: seen.append(2)); signal.raise_signal(signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR1)\n"
        "signal.alarm(9); print(seen, signal.alarm(0)); signal.pthread_sigmask(0, [10]); signal.siginterrupt(10, False)", "[1, 2, 2] 9\n"),
    "time": ("import time, datetime\n"
        "b = time.time(), time.monotonic(), time.perf_counter(), time.process_time(), time.thread_time()\n"
        "time.sleep(.01); print(datetime.datetime.now().year > 2000, time.localtime().tm_year > 2000, time.get_clock_info('monotonic').monotonic)", "True True True\n"),
    "times": ("import os, resource\nprint(os.times().user >= 0, resource.getrusage(0).ru_maxrss > 0)", "True True\n"),
    "limits": ("import resource as r\n"
        "r.setrlimit(r.RLIMIT_STACK, (1 << 24, r.getrlimit(r.RLIMIT_STACK)[1])); print(r.getrlimit(r.RLIMIT_STACK)[0])", "16777216\n"),
    "random": ("import os, random, secrets, uuid\n"
        "print(len(os.urandom(8)), random.random() < 1, random.SystemRandom().randint(1, 1), len(secrets.token_hex(4)), uuid.uuid4().version)", "8 True 1 8 4\n"),
    "numbers": ("import decimal, fractions, math, statistics\n"
        "decimal.getcontext().prec = 20\n"
        "print(decimal.Decimal(2).sqrt(), fractions.Fraction(1, 3), math.comb(9, 4), statistics.mean([1, 2]), pow(3, -1, 7))", "1.4142135623730950488 1/3 126 1.5 5\n"),
    "memory": ("x = [bytearray(1 << 20) for _ in range(200)]; del x[::2]; y = list(range(10**6)); del y; x = bytearray(300 << 20); print(len(x))", "314572800\n"),
    "mmap": ("import mmap\n"
        "m = mmap.mmap(-1, 8192); m[0] = 1; m.resize(16384); print(m[0], len(m))\n"
        "f = open('a', 'w+b'); f.write(bytes(4096)); f.flush(); m = mmap.mmap(f.fileno(), 0); m[1] = 2; m.close(); f.seek(1); print(f.read(1))", "1 16384\nb'\\x02'\n"),
    "temporary": ("import tempfile\n"
        "print(len(tempfile.mkdtemp(dir='.')) > 3, tempfile.mkstemp(dir='.')[0] > 2)\n"
        "f = tempfile.NamedTemporaryFile('w', dir='.', delete=False); f.write('x'); f.close(); print(open(f.name).read())", "True True\nx\n"),
    "select": ("import os, select\n"
        "r, w = os.pipe(); os.write(w, b'x'); p = select.poll(); p.register(r, 1); e = select.epoll(); e.register(r, 1)\n"
        "print(select.select([r], [w], [], 1) == ([r], [w], []), p.poll(100) == [(r, 1)], e.poll(1) == [(r, 1)], os.get_blocking(r)); os.set_blocking(r, False); os.set_inheritable(r, True); f = os.dup(r); os.dup2(r, f); os.close(f)", "True True True True\n"),
    "socketpair": ("import socket\na, b = socket.socketpair(); a.sendall(b'xy'); print(b.recv(9)); a.close(); b.close()", "b'xy'\n"),
    "ctypes": ("import ctypes\nC = ctypes.CDLL(None); print(C.abs(-3), ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 4)())", "3 4\n"),
    "users": ("import os, getpass\n"
        "print(os.getuid() == os.geteuid(), os.getgid() == os.getegid(), os.getpid() > 0, os.getppid() > 0, os.cpu_count() > 0, len(os.sched_getaffinity(0)) > 0)", "True True True True True True\n"),
    "platform": ("import platform, sys\nprint(platform.python_version() == sys.version.split()[0], platform.system())", "True Linux\n"),
    "terminal": ("import shutil, sys\nprint(shutil.get_terminal_size().columns, sys.stdin.isatty())", "80 False\n"),
    "copy": ("import shutil\nopen('a', 'w').write('x'); shutil.copyfile('a', 'b'); print(open('b').read())", "x\n"),
    "tracebacks": ("import traceback, warnings\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: print(traceback.format_exc()[:9])\n"
        "warnings.warn('x')", "Traceback\n"),
    "exit": ("import atexit, sys\natexit.register(print, 'bye'); sys.exit(0)", "bye\n"),
    "glob": ("import glob, pathlib\n"
        "pathlib.Path('a.txt').write_text('x'); print(glob.glob('*.txt'), pathlib.Path('a.txt').resolve().name, pathlib.Path('.').stat().st_mode > 0)", "['a.txt'] a.txt True\n"),
    "the standard library": ("import csv, io, json, pickle, re, sqlite3, struct, zlib, hashlib, string, textwrap, typing, dataclasses, enum, abc, contextlib, array, inspect, logging, argparse, unittest, traceback, calendar, zoneinfo, locale, urllib.parse, email, html, xml.etree.ElementTree, gzip, bz2, lzma\n"
        "print(pickle.loads(pickle.dumps({1: 2})), hashlib.sha256(b'').hexdigest()[:4], gzip.decompress(gzip.compress(b'x')))\n"
        "print(sqlite3.connect(':memory:').execute('select 1').fetchone(), json.dumps([1]), re.sub('a', 'b', 'aa'))", "{1: 2} e3b0 b'x'\n(1,) [1] bb\n"),
    "fast input": ("import io, os, sys\n"
        "a = (os.read(0, os.fstat(0).st_size), io.BytesIO(sys.stdin.buffer.read()).readline()); os.write(1, repr(a).encode()); sys.stdout.flush()", "(b'', b'')"),
    "small pieces": ("import faulthandler, fileinput, timeit, tracemalloc, warnings\n"
        "faulthandler.enable(); tracemalloc.start(); warnings.warn('x')\n"
        "print(list(fileinput.input()), timeit.timeit('1', number=9) < 9, sorted([2, 1]))", "[] True [1, 2]\n"),
}  # fmt: skip
