"""A reward for programs that must pass tests; they run in a sandbox (`tandem.sandbox`).

A ground truth is a mapping or its JSON text. It has `inputs` and `outputs`: texts for standard input and
output, or, with `fn_name`, a function's arguments (one JSON value per line) and its result. Or it has
`assert_case`, a list of statements.

This process compares results with the expected results, so the program never sees the expected results. There
is one exception: a statement that does not compare a call with plain values is executed in the process of the
solution. Such tests are counted as `cooperative`, because a solution could cheat in them.
"""

from __future__ import annotations

import ast
import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem import sandbox
from tandem.config.rewards import SandboxConfig
from tandem.rewards.base import Scorer, register_reward, reward_for
from tandem.sandbox import Limits, Place, Run
from tandem.texts import parse_json

FIRST = 10  # how many tests a continuous score runs; verl scores a solution by its first ten
CALLER = Path(sandbox.__file__).with_name("caller.py").read_text(encoding="utf-8")
UNSERIALISABLE = "unserialisable"


@dataclass(frozen=True, slots=True)
class Test:
    """One test of a solution.

    Attributes:
        given: The standard input, a function's arguments, or a statement to execute.
        expected: The expected standard output or result of the function.
        function: The name of the function; None if the test does not call one.
        cooperative: Whether `given` is a statement.
    """

    given: Any
    expected: Any = None
    function: str | None = None
    cooperative: bool = False

    def verdict(self, solution: str) -> str:
        """Run the test and return "passed", "failed", "timeout" or "unserialisable"."""
        if self.function is None and not self.cooperative:
            ran = sandbox.run(solution, self.given)
            return _outcome(ran, ran.status == "finished" and same_text(ran.stdout, self.expected))
        nonce = secrets.token_hex(16)
        ran = sandbox.run(CALLER, json.dumps([nonce, solution, self.function, self.given]) + "\n")
        _, marked, answer = ran.stdout.partition(nonce)
        if answer == UNSERIALISABLE:
            return UNSERIALISABLE
        came = ran.status == "finished" and bool(marked)
        return _outcome(ran, came and (self.cooperative or same_value(answer, self.expected)))


def _outcome(ran: Run, passed: bool) -> str:
    return "timeout" if ran.status == "timeout" else "passed" if passed else "failed"


@register_reward("codecontests", "apps", "codeforces", "taco")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    continuous: bool = True,
) -> dict[str, Any]:
    """Return the fraction of tests that a solution passes.

    If `continuous`, the score is the fraction of the first ten tests. Otherwise the score is 1 if the
    solution passes all tests, else 0, and testing stops at the first failure.

    "passed", "tests", "timeouts", "unserialisable" and "cooperative" are counts of the tests that ran. "acc"
    is 1 if all tests that ran passed, else 0.

    Raises:
        RewardError: There is no sandbox, or it does not answer.
        ValueError: The ground truth has no tests, or none of the formats in the module's docstring.
    """
    tests, solution = tests_of(ground_truth), program_in(solution_str)
    if continuous:
        with ThreadPoolExecutor(sandbox.place().at_once) as threads:
            verdicts = list(threads.map(lambda test: test.verdict(solution), tests[:FIRST]))
    else:
        verdicts = []
        for test in tests:
            verdicts.append(test.verdict(solution))
            if verdicts[-1] != "passed":
                break
    passed = verdicts.count("passed")
    right = float(passed == len(verdicts))
    return {
        "score": passed / len(verdicts) if continuous else right,
        "acc": right,
        "passed": passed,
        "tests": len(verdicts),
        "timeouts": verdicts.count("timeout"),
        UNSERIALISABLE: verdicts.count(UNSERIALISABLE),
        "cooperative": sum(test.cooperative for test in tests[: len(verdicts)]),
        "why": f"{passed} of {len(verdicts)} tests passed"
        + "".join(f", {name}: test {at}" for at, name in enumerate(verdicts) if name != "passed"),
    }


def place_programs(config: SandboxConfig, processes: int) -> None:
    """Set this process's sandbox; `processes` processes together run at most `max_concurrent` programs."""
    share = max(1, config.max_concurrent // max(1, processes))
    limits = Limits(config.timeout, config.memory_limit_mb)
    sandbox.use(Place(config.url, limits, share if config.url else 1))


def check_sources(
    sources: Iterable[str], own: Scorer | None, config: SandboxConfig, say: Callable[[str], None]
) -> None:
    """Check that each data source has a reward, and tell the user how programs are sandboxed.

    Args:
        sources: The data sources.
        own: The user's reward, which scores all sources; None: the built-in reward of each source.
        config: The section `reward.sandbox`.
        say: Prints a sentence for the user.

    Raises:
        RewardError: A source has no reward, or programs would run without a sandbox.
    """
    parts = {source: own.parts if own else (reward_for(source),) for source in sources}
    running = [s for s, some in parts.items() if any(part.function is compute_score for part in some)]
    if running:
        held = f"on {config.url}" if config.url else f"here, under {sandbox.protection()}"
        say(f"programs that answer {', '.join(sorted(running))} run {held}")


def program_in(response: str) -> str:
    """Return the program in a response: the last Python block, else the last block, else the response."""
    _, fence, block = response.rpartition("```python")
    if not fence and response.count("```") >= 2:
        _, block, _ = response.rsplit("```", 2)
        language, _, rest = block.partition("\n")
        return rest if language.strip().isalnum() else block
    return block.split("```", 1)[0]


def tests_of(ground_truth: Any) -> list[Test]:
    """Return the tests in a ground truth.

    Raises:
        ValueError: The ground truth has no tests, or none of the formats in the module's docstring.
    """
    truth = parse_json(ground_truth) if isinstance(ground_truth, str | bytes) else ground_truth
    if not isinstance(truth, Mapping):
        raise ValueError(f"the ground truth is not a mapping: {ground_truth!r:.80}")
    statements, inputs, outputs = (truth.get(name) for name in ("assert_case", "inputs", "outputs"))
    if statements is not None:
        tests = [_statement(str(text)) for text in statements]
    elif inputs is None or outputs is None or len(inputs) != len(outputs):
        raise ValueError("the ground truth needs assert_case, or as many outputs as inputs")
    elif name := truth.get("fn_name"):
        tests = [Test(_values(i), _value(o), str(name)) for i, o in zip(inputs, outputs, strict=True)]
    else:
        tests = [Test(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)]
    if not tests:
        raise ValueError("the ground truth has no tests")
    return tests


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _value(value: Any) -> Any:
    return parse_json(value) if isinstance(value, str) else value


def _values(value: Any) -> list[Any]:
    return [parse_json(line) for line in value.split("\n")] if isinstance(value, str) else list(value)


def _statement(text: str) -> Test:
    """Return a test for a statement: a function call for `assert f(…) == …`, else the statement itself."""
    with suppress(SyntaxError, ValueError, TypeError, RecursionError):  # Python may still execute it
        match ast.parse(text).body:
            case [ast.Assert(ast.Compare(ast.Call(ast.Name(name), given, []), [ast.Eq()], [wanted]))]:
                plain = [[ast.literal_eval(each) for each in given], ast.literal_eval(wanted)]
                if parse_json(json.dumps(plain)) == plain:  # false for tuples, sets and numeric keys
                    return Test(plain[0], plain[1], name)
    return Test(text, cooperative=True)


def same_text(given: str, expected: str) -> bool:
    """Return whether two outputs agree.

    Empty lines and the number of spaces are ignored. Words must be equal, except that numbers may differ by
    1e-5 of the expected number plus 1e-8, if at least one of the two is not an integer.
    """
    lines, wanted = (
        [words for line in text.splitlines() if (words := line.split())] for text in (given, expected)
    )
    return len(lines) == len(wanted) and all(
        len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(lines, wanted, strict=True)
    )


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    if given.lstrip("-").isdigit() and expected.lstrip("-").isdigit():
        return False
    try:
        a, b = float(given), float(expected)
    except ValueError:
        return False
    return math.isfinite(b) and abs(a - b) <= 1e-8 + 1e-5 * abs(b)


def same_value(answer: str, expected: Any) -> bool:
    """Return whether a function's JSON result equals the expected value, or the first entry of its list."""
    try:
        value = parse_json(answer)
    except (ValueError, RecursionError):
        return False
    return bool(value == expected or (isinstance(expected, list) and expected and value == expected[0]))
