"""The program behind math.Judge: reads a JSON pair of LaTeX expressions per line, writes true or false.

    python -P math_judge.py SECONDS

The operating system's alarm, left without a handler, ends the process when one pair takes longer.
"""

from __future__ import annotations

import json
import logging
import signal
import sys

from math_verify import parse, verify


def equal(gold: str, answer: str) -> bool:
    """Whether the two expressions are equal; the library's own time limits are off, this program has one."""
    golds, answers = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
    return bool(verify(golds, answers, timeout_seconds=None))


def main() -> None:
    logging.disable(logging.CRITICAL)  # the library warns that its time limits are off
    limit_s = float(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing a library prints may pass for an answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        verdict = equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("true" if verdict else "false", file=answers, flush=True)


if __name__ == "__main__":
    main()
