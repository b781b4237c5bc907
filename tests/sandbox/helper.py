"""Runs what a line of standard input asks for in a sandbox, as the user that started it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from tandem.sandbox import local

for line in sys.stdin:
    program, stdin, seconds = json.loads(line)
    begin = time.monotonic()
    ran = local.run(program, stdin, local.Limits(seconds, 1024))
    print(json.dumps(asdict(ran) | {"seconds": time.monotonic() - begin}), flush=True)
