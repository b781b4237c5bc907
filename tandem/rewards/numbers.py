"""Parse numbers in text exactly, up to `MAX_CHARACTERS` long.

A number is parsed completely or not at all. The number may include words or symbols after its digits (1.5
million, 3 1/2, 50%, 3 x 10^8). tandem.rewards.contexts has the patterns that make a number a part of
something larger.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tandem.rewards.contexts import (
    AFTER_SPACED_SIGN,
    BEFORE,
    BEFORE_OPERATOR,
    CALLED,
    GOES_ON,
    LEADS_IN,
    NO_END,
)
from tandem.rewards.measures import SCALES

MAX_CHARACTERS = 10_000  # of a number; longer ones take too long to convert, and are no answer
LINE_CHARACTERS = 100  # how many characters before a number on its line are searched
PLAIN = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![\w.]))?"
)
TRUTH = re.compile(rf"[-+]?{PLAIN}")
BLANK = "(?:[ \u00a0\u2009\u202f]|\\\\[,;: ]|\\{,\\}|,\\\\!)"
"""A separator of groups of three digits other than a comma."""
GROUPED = rf"[0-9]{{1,3}}(?:{BLANK}[0-9]{{3}})+(?![0-9/])(?:\.[0-9]+)?"
POWERS = {**SCALES, "k": 3, "m": 6, "bn": 9}
SIGN = r"(?:(?P<sign>[-+]|(?i:minus|negative)\b)(?P<gap>(?:[ \t$£€¥₹({]|\\\$){0,8}+))?"
VALUE = (
    rf"(?P<number>(?>{GROUPED}|{PLAIN}))"
    r"(?:/(?P<divisor>[0-9]+)(?![0-9.])|(?:[ \u00a0]+|\\ )(?P<top>[0-9]+)/(?P<bottom>[0-9]+)(?![0-9.]))?"
    r"(?:[ ]*(?:[x×·*]|\\times|\\cdot)[ ]*10[ ]*(?:\^|\*\*)[ ]*"
    r"(?:\{(?P<braced>[-+]?[0-9]{1,3})\}|(?P<power>[-+]?[0-9]{1,3})(?!\w)))?"
    r"(?:[ ]*(?P<letter>[kKM]|bn)(?![A-Za-z0-9])"
    r"|(?:[ ]|\\text\{)*+(?i:(?P<scale>hundred|thousand|[mb]illion|trillion|dozen)s?\b))?"
    r"(?P<percent>[ ]*\\?%|[ ]+per[ ]?cent\b)?"
)
ANYWHERE = re.compile(
    rf"{SIGN}(?<![A-Za-z0-9])(?<![A-Za-z0-9]_)(?<![\^])(?<!\^\{{)(?<!_\{{)(?<![0-9][.,]){VALUE}"
)
UNICODE_FRACTION = re.compile("[¼-¾⅐-⅞]")
RAISED = re.compile("[⁰¹²³⁴-⁹⁻]+")
TEX_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
AND_A_PART = re.compile(
    r"(?<=[0-9])\s+and\s+(?:a|one)[ -](half|quarter)\b|(?<=[0-9])\s+and\s+(?=[0-9]+/[0-9])"
)


@dataclass(frozen=True)
class Quantity:
    """A number in a text.

    Attributes:
        value: The number without its percent sign; 50 for 50%.
        percent: Whether the number has a percent sign.
    """

    value: Fraction
    percent: bool = False

    def near(self, truth: Quantity, absolute: Decimal = Decimal(), relative: Decimal = Decimal()) -> bool:
        """Return whether this is the right number, within a tolerance.

        If the right number is 50%, the numbers 50% and 50 (without the sign) and 0.5 (as a fraction) are
        right.

        Args:
            truth: The right number.
            absolute: The largest accepted difference.
            relative: The largest accepted difference, as a fraction of the right number.
        """
        pairs = [(self.value, truth.value)]
        if self.percent != truth.percent:
            bare = truth.value if self.percent else self.value
            pairs = pairs if abs(bare) >= 1 else []
            pairs.append((self._share(), truth._share()))
        return any(
            abs(one - two) <= max(Fraction(absolute), Fraction(relative) * abs(two)) for one, two in pairs
        )

    def _share(self) -> Fraction:
        return self.value / 100 if self.percent else self.value

    def __str__(self) -> str:
        """Return a decimal with finitely many digits, else a fraction; equal numbers give equal texts."""
        number, percent = self.value, "%" if self.percent else ""
        rest, places = number.denominator, 0
        for prime in (2, 5):
            count = 0
            while rest % prime == 0:
                rest, count = rest // prime, count + 1
            places = max(places, count)
        if rest != 1:
            return f"{Decimal(number.numerator):f}/{Decimal(number.denominator):f}{percent}"
        digits = f"{Decimal(abs(int(number * 10**places))):f}".rjust(places + 1, "0")
        whole, decimals = digits[: len(digits) - places], digits[len(digits) - places :]
        return f"{'-' if number < 0 else ''}{whole}{'.' if decimals else ''}{decimals}{percent}"


def readable(text: str) -> str:
    r"""Convert signs and fractions to a standard notation: ½ and \frac{1}{2} to 1/2, 10⁸ to 10^{8}."""
    text = text.translate(str.maketrans("−﹣－–", "----"))
    text = UNICODE_FRACTION.sub(
        lambda found: " " + unicodedata.normalize("NFKC", found.group()).replace("\u2044", "/"), text
    )
    text = RAISED.sub(
        lambda found: "^{" + unicodedata.normalize("NFKC", found.group()).replace("−", "-") + "}", text
    )
    text = TEX_FRACTION.sub(_fraction, text)
    return AND_A_PART.sub(
        lambda found: {"half": " 1/2", "quarter": " 1/4"}.get(found.group(1) or "", " "), text
    )


def _fraction(found: re.Match[str]) -> str:
    top, bottom = (found.group(1), found.group(2)) if found.group(1) else (found.group(3), found.group(4))
    apart = " " if found.start() and found.string[found.start() - 1].isdigit() else ""
    return f"{apart}{top}/{bottom} "


def last_quantity(text: str) -> Quantity | None:
    """Return the last number of a `readable` text; None if it is missing or part of something larger."""
    last = deque(ANYWHERE.finditer(text), maxlen=1)
    return quantity(last[0]) if last else None


def quantity(found: re.Match[str]) -> Quantity | None:
    """Return the number in a match of `SIGN` and `VALUE`; None if it is a part of something larger."""
    text, start, end = found.string, found.start("sign" if found["sign"] else "number"), found.end()
    line = text[max(text.rfind("\n", 0, start) + 1, start - LINE_CHARACTERS) : start]
    before = BEFORE.sub("", line)
    if GOES_ON.match(text, end) or ("." in found["number"] and NO_END.match(text, end)):
        return None
    if LEADS_IN.search(before) or CALLED.search(line) or not _signed(found, line, before):
        return None
    return _quantity(found)


def _signed(found: re.Match[str], line: str, before: str) -> bool:
    """Return whether the plus or minus before a number is its sign (and not an operator or a dash)."""
    if found["sign"] not in ("+", "-"):
        return True
    spaced = bool(re.search(r"\s", found["gap"])) and not AFTER_SPACED_SIGN.search(before.rstrip())
    return not spaced and not re.search(r"[\w)\]}]$", line) and not BEFORE_OPERATOR.search(before)


def _quantity(found: re.Match[str]) -> Quantity | None:
    if len(found.group()) > MAX_CHARACTERS:
        return None
    value = Fraction(Decimal(re.sub(r"[^0-9.eE+-]", "", found["number"])))
    divisors = [int(Decimal(found[name])) for name in ("divisor", "bottom") if found[name]]
    if 0 in divisors or (found["top"] and value.denominator != 1):
        return None
    if found["divisor"]:
        value /= divisors[0]
    if found["top"]:
        value += Fraction(int(Decimal(found["top"])), divisors[0])
    value *= Fraction(10) ** int(found["braced"] or found["power"] or 0)
    word = (found["scale"] or found["letter"] or "").lower()
    value *= 12 if word == "dozen" else 10 ** POWERS.get(word, 0)
    negative = found["sign"] is not None and found["sign"].lower() in ("-", "minus", "negative")
    return Quantity(-value if negative else value, bool(found["percent"]))


def to_number(ground_truth: Any) -> Fraction:
    """Convert a ground truth that is a number, or text with nothing but a number.

    Raises:
        ValueError: The ground truth is not a number or such a text.
    """
    text = str(ground_truth).strip().replace("−", "-")
    if not TRUTH.fullmatch(text):
        raise ValueError(f"the ground truth {ground_truth!r:.80} is not a number")
    return Fraction(Decimal(text.replace(",", "")))
