r"""Write the table of docs/verl-rewards.md: odd ways of writing an answer, and their scores.

    python -m docs.odd_formats

The data is in this file. Tests in tests/rewards run the scorers and compare both columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("verl-rewards.md")

FORMS = {
    "openai/gsm8k": "#### {}",
    "gsm8k, flexible": "It is {}",
    "lighteval/MATH": "\\boxed{{{}}}",
    "math_dapo": "Answer: {}",
    "numina_cn_k12": "\\boxed{{{}}}",
}
"""The compared scorers, and the form in which each of them needs an answer."""


@dataclass(frozen=True)
class Odd:
    """An odd way of writing an answer.

    Attributes:
        written: the text after the marker or in the box.
        truth: the ground truth.
        tandem, verl: one character per entry of FORMS: 1 right, 0 wrong, - if it accepts no such truth.
        why: what is right, and the reason.
        whole: whether `written` is the whole response.
    """

    written: str
    truth: str
    tandem: str
    verl: str
    why: str
    whole: bool = False

    def response(self, source: str) -> str:
        return self.written if self.whole else FORMS[source].format(self.written)


ODD = (
    Odd(
        "1 234",
        "1234",
        "11111",
        "00111",
        "Right. Groups of three digits with spaces between them are one number.",
    ),
    Odd(
        "1 234",
        "235",
        "00000",
        "00000",
        "Wrong. A space does not add numbers. (math-verify alone would add them.)",
    ),
    Odd("1,234", "1234", "11111", "10011", "Right. The comma separates thousands."),
    Odd(r"1\,234", "1234", "11111", "00000", "Right. TeX's thin space separates thousands."),
    Odd(".5", "0.5", "11111", "00101", "Right. The zero before the decimal point is optional."),
    Odd(".5", "5", "00000", "00000", "Wrong. The decimal point is part of the number."),
    Odd("1/2", "0.5", "11111", "00101", "Right. A fraction equals its quotient."),
    Odd("1/2", "1", "00000", "10000", "Wrong. The numerator is not the answer."),
    Odd("1/2", "2", "00000", "01000", "Wrong. The denominator is not the answer."),
    Odd("1e3", "1000", "11111", "00001", "Right. Programs and calculators write 1000 like this."),
    Odd("1e3", "1", "00000", "10000", "Wrong. The exponent is part of the number."),
    Odd(
        r"\boxed{72}",
        "72",
        "01111",
        "01111",
        "Right if a box is requested or any number is accepted. GSM8K's strict method needs `####`.",
        whole=True,
    ),
    Odd(
        r"#### \boxed{72}",
        "72",
        "11111",
        "01111",
        "Right. The marker is present, so the box does not matter.",
        whole=True,
    ),
    Odd(
        r"\fbox{72}",
        "72",
        "01111",
        "01001",
        r"Right, as above. MATH's own solutions also use `\fbox`.",
        whole=True,
    ),
    Odd(
        r"$\boxed 42$",
        "42",
        "01111",
        "01101",
        "Right, as above. MATH's own solutions sometimes omit the braces.",
        whole=True,
    ),
    Odd("**72**", "72", "11111", "01000", "Right. Bold marks are not part of the number."),
    Odd("£5", "5", "11111", "01000", "Right. The true answers of these datasets have no currency."),
    Odd(r"\$5", "5", "11111", "01111", "Right, as above."),
    Odd("£5", r"\$5", "--000", "--000", "Wrong. The two currencies differ."),
    Odd(
        "5?",
        "5",
        "11111",
        "11000",
        "Right. A question mark is not part of a number. (The `!` in `5!` is, and `5!` is 120.)",
    ),
    Odd("5.", "5", "11111", "00001", "Right. The period ends a sentence."),
    Odd(
        "5!",
        "5",
        "11000",
        "11000",
        "Wrong in mathematics, because it is a factorial. GSM8K takes only the number.",
    ),
    Odd(
        "4 = 5",
        "5",
        "01000",
        "01111",
        "Wrong. The equation is false. GSM8K's flexible method takes the last number of any text.",
    ),
    Odd("4 = 5", "4", "00000", "10000", "Wrong, as above."),
    Odd(
        "2 + 3 = 5",
        "5",
        "01111",
        "01011",
        "Right. The equation is true and ends with the answer. After `####`, GSM8K needs the number itself.",
    ),
    Odd("x = 5", "5", "11111", "01111", "Right, as above."),
    Odd(
        r"2 \text{ or more}",
        "2",
        "00000",
        "11101",
        "Wrong. The answer includes other numbers.",
    ),
    Odd("2 or more", "2", "00000", "11000", "Wrong, as above."),
    Odd(r"24 \text{ students}", "24", "11111", "11111", "Right. The answer may name what is counted."),
    Odd(
        "5 m",
        "5 cm",
        "--000",
        "--000",
        "Wrong. The two units differ. Units are not converted: `500 cm` is wrong here, too.",
    ),
    Odd(r"5\text{ m}", r"5\text{ cm}", "--000", "--111", "Wrong, as above."),
    Odd(r"5\text{ cm}", "5", "11111", "11111", "Right. The true answers of these datasets have no units."),
    Odd(
        "5",
        r"5\text{ cm}",
        "--111",
        "--111",
        "Right. If only one of the two has a unit, the numbers are compared.",
    ),
    Odd(
        "[5,5]",
        "5",
        "00000",
        "00000",
        "Wrong. An interval or a pair is not a number.",
    ),
    Odd(
        "[5,5]",
        "(5,5)",
        "--000",
        "--000",
        "Wrong. One interval includes its ends and the other does not; or only one of them is a point.",
    ),
    Odd("a", "A", "--000", "--001", "Wrong. Case distinguishes symbols, such as side a and vertex A."),
    Odd("monday", r"\text{Monday}", "--111", "--001", "Right. Case does not distinguish words."),
    Odd("5 6", "11", "00000", "00000", "Wrong. Two numbers next to each other are not their sum."),
    Odd("1011_3", "1011_2", "--000", "--001", "Wrong. The two bases differ."),
    Odd("0.3333", r"\frac{1}{3}", "--000", "--000", "Wrong. The decimal does not equal the fraction."),
    Odd(
        r"\frac12",
        "0.5",
        "11111",
        "00101",
        "Right. This is another form of the same value.",
    ),
)

MARK = "<!-- The table below is made by python -m docs.odd_formats -->\n"


def table() -> str:
    """Return the table in Markdown."""
    rows = [f"| `{odd.written}` | `{odd.truth}` | {odd.tandem} | {odd.verl} | {odd.why} |" for odd in ODD]
    head = ["| written | truth | Tandem | verl | what is right, and why |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def page(text: str) -> str:
    """Return the page with its current table."""
    return text.partition(MARK)[0] + MARK + "\n" + table()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the table of docs/{PAGE.name}")
