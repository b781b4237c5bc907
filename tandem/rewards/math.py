"""Mathematics with boxed answers, in the style of MATH: right if the last \\boxed{…} of the response
equals the ground truth as an expression, which the library math-verify decides.

Hendrycks et al., "Measuring Mathematical Problem Solving With the MATH Dataset", arXiv 2103.03874.

A model may write an expression that no computer finishes, such as 9^{9^{9^9}}, and neither a Python
signal handler nor a thread can stop arithmetic on one huge number. Expressions are therefore compared in a
process of their own (math_judge.py), which the operating system ends when a comparison takes too long.
"""

from __future__ import annotations

import atexit
import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.errors import RewardError
from tandem.rewards.base import register_reward

TIME_LIMIT_S = 5.0
"""For one comparison; one that takes longer counts as wrong."""
MAX_ANSWER_CHARACTERS = 1000
"""A longer box counts as none."""
MAX_TAIL_CHARACTERS = 10_000
"""How much of a response's end is searched for a box."""
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character, which is not one."""
BOX = "\\boxed{"


def last_boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{…}, nested braces included; None if there is none."""
    text = text[-MAX_TAIL_CHARACTERS:]
    start = text.rfind(BOX)
    while start >= 0:
        content = start + len(BOX)
        depth = 1
        for match in BRACE.finditer(text, content, content + MAX_ANSWER_CHARACTERS):
            depth += {"{": 1, "}": -1}.get(match.group(), 0)
            if depth == 0:
                return text[content : match.start()].strip()
        start = text.rfind(BOX, 0, start)
    return None


class Judge:
    """A process that compares expressions; starts with the first comparison, and anew after it was ended.

    Safe to use from several threads: they take turns.

    Args:
        time_limit_s: seconds for one comparison.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def equal(self, gold: str, answer: str) -> bool:
        """Whether two LaTeX expressions are equal; false if that takes too long to find out.

        Raises:
            RewardError: the process cannot be started.
        """
        with self._lock:
            reply = self._ask(json.dumps([gold, answer]))
            if reply == "":  # ended by the time limit, or by an expression that took all memory
                self.close()
            return reply == "true"

    def _ask(self, question: str) -> str:
        """The answer's line, or "" if the process ended before it answered."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(question + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline().strip()

    def _start(self) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("math_judge.py")
        self._process = subprocess.Popen(
            # -P keeps this folder, whose modules have names of the standard library, off the path.
            [sys.executable, "-P", str(program), str(self._time_limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C at the terminal is the trainer's to handle
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.close()
            raise RewardError(
                "the process that compares mathematical answers did not start",
                field="reward of mathematical data",
                got="its last words stand above",
                remedy="pip install 'math-verify[antlr4_13_2]'",
            )
        return self._process

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_JUDGE = Judge()
atexit.register(_JUDGE.close)


@register_reward(
    "lighteval/MATH*",
    "DigitalLearningGmbH/MATH-lighteval*",
    "HuggingFaceH4/MATH-500*",
    "HuggingFaceH4/aime*",
    "math",
    "MATH",
    answer=last_boxed,
)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 for a boxed answer equal to the ground truth (an expression, or a solution that boxes it), else 0.

    Raises:
        RewardError: the process that compares expressions cannot be started.
    """
    answer = last_boxed(solution_str)
    if not answer:
        return 0.0
    gold = last_boxed(str(ground_truth)) or str(ground_truth).strip()
    return float(answer == gold or _JUDGE.equal(gold, answer))
