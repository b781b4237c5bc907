"""The program that calls a solution's function inside a sandbox.

The program knows the arguments but not the expected result. It writes the result as JSON, and Tandem compares
the result with the expected result outside of the sandbox.

The program is self-contained and imports no module of Tandem. It reads one line of JSON from standard input,
with four values: a nonce, the solution, the name of a function, and the function's arguments. If the name is
None, the last value is a statement to execute instead. The nonce marks the answer, so that output of the
solution cannot be taken for the answer.
"""

from __future__ import annotations

import json
import os
import sys

NAMES = """
import collections, heapq, bisect, copy, functools, itertools, json, math, operator, random, re, string, sys
from bisect import *; from collections import *; from copy import *; from functools import *
from heapq import *; from itertools import *; from math import *; from typing import *
"""
"""Executed before the solution, because the problems assume that these names are defined."""
UNSERIALISABLE = "unserialisable"


def main() -> None:
    nonce, solution, name, given = json.loads(sys.stdin.readline())
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    space = {"__name__": "solution"}
    exec(NAMES, space)
    exec(compile(solution, "solution.py", "exec", dont_inherit=True), space)
    if name is None:
        exec(compile(given, "test.py", "exec", dont_inherit=True), space)
        answer = "null"
    else:
        function = space[name] if name in space else getattr(space["Solution"](), name)  # type: ignore[operator]
        result = function(*given)  # type: ignore[operator]
        try:
            answer = json.dumps(result)
        except (TypeError, ValueError):
            answer = UNSERIALISABLE
    with os.fdopen(answers, "w", encoding="utf-8") as file:
        file.write(nonce + answer)
    os._exit(0)


main()
