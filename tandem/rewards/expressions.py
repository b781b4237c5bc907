r"""Decide whether two mathematical answers have the same value, even if their notation differs.

The library math-verify parses expressions, and a separate process (comparer_program.py) compares their values
exactly. The library drops words and units, adds up numbers that are separated by spaces, ignores the case of
letters, and takes the right side of an equation whatever the left side is. Therefore, this module first
converts numbers to a standard notation. It compares units, currencies and the like separately (measures.py).
Some types of answers are never compared by value.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Sequence

from tandem.rewards.comparer import Comparer
from tandem.rewards.measures import COMMAND, TEXT, WORD, Measured, measured

_COMPARER = Comparer()
atexit.register(_COMPARER.close)

BLANKS = re.compile("[\u00a0\u2000-\u200a\u202f\u3000\\s]+")
THOUSANDS = re.compile(r"(?<![\d.,_])\d{1,3}(?:(?:[ ~]|\\[,;: ]|\{,\}|,\\!|\\!)\d{3})+(?![\d/])")
"""A number whose groups of three digits are separated by spaces or by TeX's commas."""
MIXED = re.compile(r"(\d)\s+(\d+)\s*/\s*(\d+)")
SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])")
ROW_OF_NUMBERS = re.compile(r"\d\s+[\d.]")
SPACED_ARGUMENTS = re.compile(r"\\[A-Za-z]+\s*_?\d\s+\d")
"""TeX arguments without braces, as in \\frac 1 2 and \\log_2 8."""
SENTENCE = re.compile(r"\\text\{[^{}]*\b(?:is|are)[\s:]*\}")
"""The beginning of a sentence that ends with the value."""
WHOLE = re.compile(rf"{TEXT}\{{([^{{}}]*)\}}")  # an answer that consists of text only
PAIR = re.compile(r"(?:\\left\s*)?[(\[].*,.*(?:\\right\s*)?[)\]]", re.DOTALL)
BRACES = re.compile(r"(?:\\left\s*)?\\\{.*\\\}", re.DOTALL)
SET = re.compile(r"[,<>]|\\(?:le|ge|lt|gt|ne|in|cup|cap|infty|text|emptyset|mathbb|pm)")
"""Signs that an answer is more than one number."""
SPELLINGS = (
    (re.compile("−"), "-"),
    (re.compile("…"), r"\\ldots "),
    (re.compile("∞"), r"\\infty "),
    (re.compile(r"∅|\\varnothing"), r"\\emptyset"),
    (re.compile(r"≤|⩽|\\leqslant"), r"\\le "),
    (re.compile(r"≥|⩾|\\geqslant"), r"\\ge "),
    (re.compile(r"°|\\degree(?![A-Za-z])"), r"^\\circ"),
)
"""A dict from a variant of a symbol to the standard symbol."""
REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))")
"""A decimal whose last digits repeat."""
DEGREES_OF = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc))\s*(?:\\left)?([({]?)\s*(-?[\d.]+)\s*\^\s*\{?\s*\\circ\s*\}?\s*(?:\\right)?[)}]?"
)
"""A function of an angle in degrees."""
DOTS = re.compile(r"\\[lc]?dots")
MAX_EQUATION_SIDES = 5
LEFT, RIGHT = " \t\n*_`$", " \t\n*_`$.,:;?"


def same_as_any(golds: Sequence[str], answer: str | None) -> bool:
    """Return whether the answer equals one of the right answers (see `same`); False for None."""
    return bool(answer) and any(same(gold, str(answer)) for gold in golds)


def same(gold: str, answer: str) -> bool:
    """Return whether an answer equals the right answer; False if the comparison exceeds the time limit.

    Args:
        gold: The right answer, in LaTeX or plain text.
        answer: The answer, in LaTeX or plain text.

    Raises:
        RewardError: The process that compares values cannot be started.
    """
    one, two = plain(gold), plain(answer)
    if one == two or (len(one) > 2 and one.isalpha() and one.lower() == two.lower()):
        return bool(two)
    truth, given = measured(one), measured(two)
    return truth.agrees(given) and _same_value(truth, given)


def plain(text: str) -> str:
    """Return an answer without the markup around it, with its numbers in standard notation."""
    text = BLANKS.sub(" ", text)
    for written, meant in SPELLINGS:
        text = written.sub(meant, text)
    text = DEGREES_OF.sub(r"\1(\\frac{\3\\pi}{180})", REPEATING.sub(_fraction, text))
    text = text.removeprefix(r"\(").removesuffix(r"\)").lstrip(LEFT)
    text = SENTENCE.sub("", text, count=1) if SENTENCE.match(text) else text
    stripped = text.rstrip(RIGHT)
    text = stripped + text[len(stripped)] if stripped.endswith("\\") and stripped != text else stripped
    text = WHOLE.sub(r"\1", text).strip() if WHOLE.fullmatch(text) else text
    text = THOUSANDS.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    return SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)


def _fraction(repeating: re.Match[str]) -> str:
    """Convert a repeating decimal to a fraction, such as 0.333… to 1/3."""
    whole, start, again = repeating.group(1), repeating.group(2), repeating.group(3) or repeating.group(4)
    nines = (10 ** len(again) - 1) * 10 ** len(start)
    return rf"\frac{{{int(whole + start + again) - int((whole + start) or 0)}}}{{{nines}}}"


def _same_value(truth: Measured, given: Measured) -> bool:
    gold, answer = truth.value, given.value
    if not gold or not answer or _is_row(gold) or _is_row(answer) or _case_differs(gold, answer):
        return False
    if PAIR.fullmatch(answer) and not SET.search(gold):
        return False  # an interval from 5 to 5 is not the number 5
    if bool(DOTS.search(gold)) != bool(DOTS.search(answer)):
        return False  # the library ignores dots
    if any(BRACES.fullmatch(one) and PAIR.fullmatch(two) for one, two in ((gold, answer), (answer, gold))):
        return False  # a set is not a pair
    if PAIR.fullmatch(gold) and PAIR.fullmatch(answer) and ("\\{" in gold) != ("\\{" in answer):
        return False  # a pair with a set in it is not a pair of numbers
    return gold == answer or (_holds(answer) and _COMPARER.equal(gold, answer))


def _is_row(text: str) -> bool:
    """Return whether a text has numbers that are separated only by spaces."""
    return bool(ROW_OF_NUMBERS.search(SPACED_ARGUMENTS.sub("", text)))


def _case_differs(gold: str, answer: str) -> bool:
    """Return whether upper and lower case of a single letter differ between answer and truth."""
    one, two = (
        {letter for run in WORD.findall(COMMAND.sub(" ", text)) if len(run) < 3 for letter in run}
        for text in (gold, answer)
    )
    return any(letter not in one and letter.swapcase() in one for letter in two)


def _holds(answer: str) -> bool:
    """Return whether an equation's numbers are equal: True for 2 + 3 = 5 or x = 5, False for 4 = 5."""
    *others, last = answer.split("=")
    if len(others) >= MAX_EQUATION_SIDES:
        return False
    numbers = [side for side in others if side.strip() and not WORD.search(COMMAND.sub(" ", side))]
    return all(_COMPARER.equal(side, last) for side in numbers)
