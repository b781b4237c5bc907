"""The program behind `Comparer`: read a JSON pair of LaTeX expressions per line, write true or false.

    python -P comparer_program.py SECONDS

The library math-verify parses the expressions. This program compares their values exactly. Decimals are
converted to fractions. For other values, the program tries to prove equality (SymPy's simplification, minimal
polynomials). There is no tolerance. If equality cannot be proven, the answers are not equal.

The operating system's alarms, which have no handlers, kill the process when one pair takes more than SECONDS
of CPU time, or more than WAIT · SECONDS of wall-clock time. The main limit is CPU time, so that scores do not
depend on other processes of the machine.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

import sympy
from math_verify import parse
from sympy import And, Basic, Eq, FiniteSet, Float, Interval, MatrixBase, Mul, Rational, Symbol, Tuple, Union
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

WAIT = 10  # how many times longer a comparison may take on the clock of a busy machine
PERCENT = sympy.UnevaluatedExpr(Rational(1, 100))


def equal(gold: str, answer: str) -> bool:
    """Return whether two expressions are equal, without the library's time limits."""
    golds, answers = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
    return any(_same(_exact(one), _exact(two)) for one in golds for two in answers)


def _exact(value: Any) -> Any:
    """Return an expression with its decimals replaced by fractions."""
    if isinstance(value, MatrixBase):
        return value.applyfunc(_exact)
    if isinstance(value, Basic):
        return value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)})
    return value.strip()


def _same(gold: Any, answer: Any) -> bool:
    if isinstance(gold, str) or isinstance(answer, str):
        return isinstance(gold, str) and bool(gold) and gold == answer
    gold, answer = _unwrapped(gold, answer)
    if gold == sympy.nan or gold == sympy.zoo:
        return False
    if isinstance(gold, MatrixBase) or isinstance(answer, MatrixBase):
        alike = isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase) and gold.shape == answer.shape
        return alike and all(map(_same, gold.flat(), answer.flat()))
    if _is_relation(gold) and _is_relation(answer):
        return _same_relation(gold, answer)
    if _is_relation(gold) or _is_relation(answer):
        gold, answer = _as_set(gold), _as_set(answer)
    if isinstance(gold, sympy.Set | Tuple) or isinstance(answer, sympy.Set | Tuple):
        return _same_set(gold, answer)
    return isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr) and _same_number(gold, answer)


def _unwrapped(gold: Any, answer: Any) -> tuple[Any, Any]:
    """If exactly one of the two values is an assignment, replace the assignment by its right side."""
    gold, answer = _shortened(gold), _shortened(answer)
    if isinstance(answer, Eq) and not _is_relation(gold):
        return gold, answer.rhs
    if isinstance(gold, Eq) and _is_name(gold.lhs) and not _is_relation(answer):
        return gold.rhs, answer
    return gold, answer


def _shortened(value: Any) -> Any:
    """Reduce a chain of equations to its first and last side."""
    if isinstance(value, And) and all(isinstance(part, Eq) for part in value.args):
        parts = value._unsorted_args
        return Eq(parts[0].lhs, parts[-1].rhs, evaluate=False)
    return value


def _is_name(value: Any) -> bool:
    return isinstance(value, Symbol | AppliedUndef) or (
        isinstance(value, Mul) and all(isinstance(part, Symbol) for part in value.args)
    )


def _is_relation(value: Any) -> bool:
    return isinstance(value, Relational) or (
        isinstance(value, And) and all(isinstance(part, Relational) for part in value.args)
    )


def _as_set(value: Any) -> Any:
    """Return the set of numbers that satisfy inequalities in one variable; return other values unchanged."""
    if _is_relation(value) and not isinstance(value, Eq) and len(value.free_symbols) == 1:
        return value.as_set()
    return value


def _same_relation(gold: Any, answer: Any) -> bool:
    if isinstance(gold, And) or isinstance(answer, And):
        if isinstance(gold, And) and isinstance(answer, And) and _matched(gold.args, answer.args):
            return True
        one_name = gold.free_symbols == answer.free_symbols and len(gold.free_symbols) == 1
        return one_name and bool(gold.as_set() == answer.as_set())
    sides = gold.rhs, answer.rhs
    if isinstance(gold, Eq) and isinstance(answer, Eq) and any(isinstance(s, sympy.Set) for s in sides):
        return gold.lhs == answer.lhs and _same(gold.rhs, answer.rhs)
    one, two = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    if type(gold) is type(answer) and _same_number(one, two):
        return True
    ratio = sympy.simplify(one / two) if two != 0 else sympy.S.Zero
    if not ratio.is_number or ratio.is_zero is not False or ratio.is_finite is False:
        return False
    if isinstance(gold, Eq | sympy.Ne):
        return type(gold) is type(answer)
    meant = type(answer) if ratio.is_positive else type(answer.reversed)
    return type(gold) is meant and ratio.is_extended_real is True


def _same_set(gold: Any, answer: Any) -> bool:
    if gold == answer:
        return True
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        ends = gold.left_open == answer.left_open and gold.right_open == answer.right_open
        return ends and _same(gold.start, answer.start) and _same(gold.end, answer.end)
    if isinstance(gold, Tuple) and isinstance(answer, Tuple):
        return len(gold) == len(answer) and all(map(_same, gold, answer))
    if isinstance(gold, Union) and isinstance(answer, Union) and _matched(gold.args, answer.args):
        return True
    one, two = (FiniteSet(part) if isinstance(part, sympy.Expr) else part for part in (gold, answer))
    return isinstance(one, FiniteSet) and isinstance(two, FiniteSet) and _matched(one.args, two.args)


def _matched(golds: Sequence[Any], answers: Sequence[Any]) -> bool:
    """Return whether the two lists of values are equal up to their order."""
    rest = list(answers)
    for gold in golds:
        found = next((at for at, answer in enumerate(rest) if _same(gold, answer)), None)
        if found is None:
            return False
        del rest[found]
    return not rest


def _same_number(gold: Any, answer: Any) -> bool:
    percents = [isinstance(part, Mul) and PERCENT in part.args for part in (gold, answer)]
    shares = [part.subs(PERCENT, Rational(1, 100)).doit() for part in (gold, answer)]
    if percents[0] != percents[1]:
        bare = [part.subs(PERCENT, 1).doit() for part in (gold, answer)]
        if (abs(bare[0]) >= 1) == True and bare[0] == bare[1]:  # noqa: E712 - an undecided comparison is not True
            return True
    one, two = shares
    if one == two:
        return True
    if _is_word(one, two) or _is_word(two, one):
        return True
    difference = one - two
    if difference.is_number and _apart(difference):
        return False
    if sympy.simplify(difference) == 0:
        return True
    return bool(difference.is_algebraic and difference.equals(0))


def _is_word(one: Any, two: Any) -> bool:
    """Return whether one value is a name and the other is the product of the name's letters."""
    letters = Symbol, type(sympy.E)
    if not isinstance(one, Symbol) or not isinstance(two, Mul | Symbol | type(sympy.E)):
        return False
    parts = two.args if isinstance(two, Mul) else (two,)
    names = [part.name if isinstance(part, Symbol) else "e" for part in parts if isinstance(part, letters)]
    if len(names) != len(parts):
        return False
    found = "".join(names)
    return found == one.name or (len(found) > 1 and found.lower() == one.name.lower())


def _apart(difference: Any) -> bool:
    """Return whether a number is certainly not 0: larger than its error after fifteen digits."""
    value = sympy.N(difference, 15)
    return bool(value.is_comparable and abs(value) > Rational(1, 10**6))


def alarms(limit_s: float) -> None:
    """Set the alarms for CPU time and wall-clock time; 0 removes the alarms."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    signal.setitimer(signal.ITIMER_REAL, WAIT * limit_s)


def main() -> None:
    logging.disable(logging.CRITICAL)  # the library would warn that its time limits are off
    limit_s = float(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # output of a library must not look like an answer
    equal("1", "1")  # loads the library's grammar, so that no comparison is charged for it
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        alarms(limit_s)
        try:
            verdict = equal(*json.loads(line))
        except Exception:  # a library may fail in any way on text that a model wrote
            verdict = False
        alarms(0)
        print("true" if verdict else "false", file=answers, flush=True)


if __name__ == "__main__":
    main()
