r"""Separate the value of a mathematical answer from its unit, currency, base and qualifying words.

If two answers both name a unit, currency or base, the names must agree. If only one answer names it, the
answers may still be equal, because answers in datasets often leave out units. Words such as "or more" change
the value itself, so either both answers must have such words, or neither. Units are not converted into each
other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox|operatorname)"
POWER = r"(?:\s*\^\s*\{?\s*(?P<power>\d)\s*\}?)?"
TAIL = re.compile(rf"(?P<value>.*\S)\s*(?:{TEXT}\s*\{{(?P<words>[^{{}}]*)\}}){POWER}", re.DOTALL)
"""An answer that ends with words in a TeX command for text, such as \text{…}."""
PLAIN_TAIL = re.compile(rf"(?P<value>.*[\d}})])(?P<words>\s*[A-Za-z][A-Za-z ./]*){POWER}", re.DOTALL)
"""An answer that ends with plain words."""
BASE = re.compile(r"[0-9A-F]_\{?(\d+)\}?$")
COMMAND = re.compile(r"\\[A-Za-z]+")
WORD = re.compile(r"[A-Za-z]+")
SPACING = re.compile(r"(?:\\[,;:! ]|~|\s)+$")

CURRENCIES = {
    "$": re.compile(r"\\\$|\busd\b|\bdollars?\b", re.IGNORECASE),
    "£": re.compile(r"£|\\pounds\b"),
    "€": re.compile(r"€|\\euro\b|\beuros?\b", re.IGNORECASE),
    "¥": re.compile("¥|\\byen\\b"),
    "₹": re.compile(r"₹|\brupees?\b", re.IGNORECASE),
    "¢": re.compile(r"¢|\bcents?\b", re.IGNORECASE),
}
QUALIFIERS = frozenset(
    ("more", "less", "fewer", "least", "most", "greater", "than", "exceeds", "between", "above", "below")
) | {"over", "under", "not", "no", "except"}
FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "mod", "gcd", "lcm", "max", "min")
) | {"choose"}
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Number words, with their powers of ten."""
UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre",
        "cm centimeter centimetre",
        "m meter metre",
        "km kilometer kilometre",
        "in inch inche",
        "ft foot feet",
        "yd yard",
        "mi mile",
        "mg milligram",
        "g gram gm",
        "kg kilogram",
        "lb lbs pound",
        "oz ounce",
        "ton",
        "s sec second",
        "min minute",
        "h hr hour",
        "day",
        "week",
        "month",
        "year",
        "ml milliliter millilitre",
        "l liter litre",
        "gal gallon",
        "degree",
        "rad radian",
        "am",
        "pm",
    )
    for name in names.split()
}
POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}


@dataclass(frozen=True)
class Measured:
    """A mathematical answer, split into value, unit, currency, base and qualifying words.

    Attributes:
        value: The value in LaTeX.
        unit: The unit; None if the answer has no unit.
        currency: The currency; None if the answer has no currency.
        base: The base; None if the answer has no base.
        qualifiers: The words that change the meaning of the value.
    """

    value: str
    unit: str | None
    currency: str | None
    base: str | None
    qualifiers: frozenset[str]

    def agrees(self, other: Measured) -> bool:
        """Return whether unit, currency, base and qualifying words agree; values are ignored."""
        pairs = ((self.unit, other.unit), (self.currency, other.currency), (self.base, other.base))
        named = all(one == two for one, two in pairs if one is not None and two is not None)
        return named and self.qualifiers == other.qualifiers


def measured(text: str) -> Measured:
    """Split an answer into value, unit, currency, base and qualifying words."""
    plain_words = frozenset(word.lower() for word in WORD.findall(COMMAND.sub(" ", text)))
    currency = next((sign for sign, pattern in CURRENCIES.items() if pattern.search(text)), None)
    bare = text
    for pattern in CURRENCIES.values():
        bare = pattern.sub("", bare)
    value, unit = _parted(re.sub(rf"{TEXT}\{{\s*\}}", "", bare).strip())
    base = BASE.search(value)
    return Measured(value, unit, currency, base and base.group(1), plain_words & QUALIFIERS)


def _parted(text: str) -> tuple[str, str | None]:
    """Split an answer into its value and the unit in the words after the value.

    If the words belong to the value, return the whole answer and None. If there is no unit, the unit is None.
    """
    tail = TAIL.fullmatch(text) or PLAIN_TAIL.fullmatch(text)
    if tail is None or not re.search(r"\d|\\pi", tail["value"]):
        return text, None
    words = tail["words"].replace(".", "").lower().split()
    scale = SCALES.get(words[0]) if words else None
    power = tail["power"] or ""
    unit = unit_named(words, power)
    if tail.re is PLAIN_TAIL and not _beside(tail["words"], words[0], scale is not None or unit is not None):
        return text, unit
    value = SPACING.sub("", tail["value"])
    return (value if scale is None else rf"{value} \times 10^{{{scale}}}"), unit


def _beside(written: str, word: str, known: bool) -> bool:
    """Return whether plain words follow the value as a unit; a letter right after a number is a factor."""
    if not written[0].isspace():
        return known and len(word) > 1
    return known or (len(word) > 2 and word not in FUNCTIONS) or word == "or"


def unit_named(words: list[str], power: str = "") -> str | None:
    """Return the standard name of the unit that words name; None if the words name no unit.

    Args:
        words: The words in lower case, without full stops; "per" and "/" divide.
        power: The power of the unit; "" for 1.
    """
    found = []
    for part in " ".join(words).replace(" per ", "/").replace("mph", "mi/h").split("/"):
        names = part.split()
        singular = (name if name in UNITS else name.removesuffix("s") for name in names)
        unit = next((UNITS[name] for name in singular if name in UNITS), None)
        if unit is None:
            return None
        exponent = next((POWERS[name] for name in names if name in POWERS), "")
        found.append(unit + exponent)
    return "/".join(found) + power
