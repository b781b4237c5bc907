"""Compare mathematical expressions in a separate process.

A model may write an expression that no computer can evaluate, such as 9^{9^{9^9}}, and neither a Python
signal handler nor a thread can stop arithmetic on one huge number. Expressions are therefore compared in a
separate process (comparer_program.py), which the operating system kills when a comparison takes too long.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

from tandem.errors import RewardError

TIME_LIMIT_S = 5.0  # CPU time for one comparison; if it takes longer, the answer counts as wrong


class Comparer:
    """A process that compares expressions.

    The process starts with the first comparison, and again after it was killed. Several threads may use a
    Comparer. It compares one pair at a time.

    Args:
        time_limit_s: The limit of CPU time for one comparison, in seconds.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def equal(self, gold: str, answer: str) -> bool:
        """Return whether two LaTeX expressions are equal; False if the comparison exceeds the time limit.

        Args:
            gold: The right answer.
            answer: The answer to compare with the right answer.

        Raises:
            RewardError: The process cannot be started.
        """
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            reply = ""
            try:
                process.stdin.write(json.dumps([gold, answer]) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline().strip()
            except BrokenPipeError:
                pass
            finally:
                # The process was ended by the time limit, or used up all memory. Or a signal interrupted the
                # wait: then the late answer must not be read as the answer to the next pair.
                if not reply:
                    self.close()
            return reply == "true"

    def _start(self) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("comparer_program.py")
        self._process = subprocess.Popen(
            # -P removes this folder from the path: its modules have names of standard library modules.
            [sys.executable, "-P", str(program), str(self._time_limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C in the terminal must reach only the trainer
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.close()
            raise RewardError(
                "the process that compares mathematical answers did not start",
                field="reward of mathematical data",
                got="its error messages are above",
                remedy="pip install 'math-verify[antlr4_13_2]'",
            )
        return self._process

    def close(self) -> None:
        """Stop the process, if it is running."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
