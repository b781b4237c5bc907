"""The program that calls a solution's function inside a sandbox. It knows the arguments and not what should
come of them, and writes the result as JSON; whether that is right is judged outside.

It runs alone. Its standard input is a line of JSON: the nonce that marks its answer, so that what the
solution prints is none; the solution; the function's name and arguments, or None and a statement to execute.
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
"""Before the solution, as its problems are set where these names are known."""
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
