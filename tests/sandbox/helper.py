"""Runs programs in a sandbox, as the user that started this process.

    python -m tests.sandbox.helper Sandlock

The first line of output says why the sandbox does not work on this machine, or "null". After that, each line
of standard input describes a program, and each line of output a result.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from tandem.errors import RewardError
from tandem.sandbox import local, protections

kind = getattr(protections, sys.argv[1])
try:
    tried = local.run("print(1)", "", local.Limits(), kind)
    problem = None if tried.stdout == "1\n" else f"{tried.status}: {tried.stderr}"
except RewardError as error:
    problem = str(error)
print(json.dumps(problem), flush=True)
for line in sys.stdin:
    program, stdin, seconds = json.loads(line)
    begin = time.monotonic()
    ran = local.run(program, stdin, local.Limits(seconds, 1024), kind)
    print(json.dumps(asdict(ran) | {"seconds": time.monotonic() - begin}), flush=True)
