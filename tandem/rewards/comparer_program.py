"""The program behind `Comparer`: reads a JSON pair of LaTeX expressions per line, writes true or false.

    python -P comparer_program.py SECONDS

The operating system's alarms, left without handlers, end the process when one pair takes more than SECONDS of
the processor's time, so that no score depends on what else the machine does, or WAIT times that on the clock.
"""

from __future__ import annotations

import json
import logging
import signal
import sys

from math_verify import parse, verify

WAIT = 10
"""How much longer a comparison may take on the clock of a busy machine."""


def equal(gold: str, answer: str) -> bool:
    """Whether the two expressions are equal; the library's own time limits are off, this program has one."""
    golds, answers = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
    return bool(verify(golds, answers, timeout_seconds=None))


def alarms(limit_s: float) -> None:
    """Sets the alarms of the processor's time and of the clock; 0 takes them back."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    signal.setitimer(signal.ITIMER_REAL, WAIT * limit_s)


def main() -> None:
    logging.disable(logging.CRITICAL)  # the library warns that its time limits are off
    limit_s = float(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing a library prints may pass for an answer
    equal("1", "1")  # loads the library's grammar, which is no part of a comparison's time
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        alarms(limit_s)
        verdict = equal(*json.loads(line))
        alarms(0)
        print("true" if verdict else "false", file=answers, flush=True)


if __name__ == "__main__":
    main()
