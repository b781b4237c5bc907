r"""Patterns of the text around a number that show that the number is part of something larger.

The number may be part of a date, a time, a range, a comparison, an expression or a name, or one of several
numbers.

Only the line with the number is searched. Markup (bold, code, formulas, brackets) is skipped.
"""

from __future__ import annotations

import re

from tandem.rewards.measures import FUNCTIONS, UNITS

B = "[ \t\u00a0\u2009\u202f]*+"
MARK = r"[*_`$£€¥₹({]|\\[$(\[{]|\\(?:boxed|fbox|text|textbf|mathbf|mathrm)\{"
OPENING = rf"(?:{MARK}|[ \t\u00a0])*+"  # markup before a number
CLOSING = rf"(?:[*_`$)}}\] \t\u00a0]|\\[)\]}},!;: ]|\\(?:text|textbf|mathrm|mbox)\{{)*+{B}"
"""Markup after a number."""
NEXT = rf"{OPENING}[-+]?{OPENING}\.?[0-9]"  # another number


def _one_of(*words: str) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


COUNTED = _one_of(
    *set(UNITS) - {"in", "am", "pm"}, "dollar", "euro", "cent", "percent", "quart", "pint", "cup"
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "thousand")
ATTACHED = _one_of(*UNITS, "kw", "kwh", "mw", "gb", "mb", "kb", "hp", "hz", "ha", "cc")
"""Units of one or more letters that may follow a number without a space."""
PARTS = r"(?:half|halves|thirds?|quarters?|fourths?|fifths?|sixths?|eighths?|tenths?|hundredths?)"
MORE = rf"(?!{NEXT}[0-9.,]*+{B}(?:more|left))"
GOES_ON = re.compile(
    rf"""
    \.[0-9] | \.?\\(?:overline|bar|dot)\b | \.?\([0-9A-Za-z] | [+^] | \*\*[0-9(] | _\{{?[0-9]
    | {B}\*(?!\*){B}[0-9(\\] | :[0-9] | [ ]+:[ ]+[0-9] | (?:st|nd|rd|th)\b
    | {B}[²³ⁿ√π∞±‰万亿千百億萬\u0391-\u03c9] | [’'′"″]{B}[0-9] | ({B}[·*×]|\\cdot|\\times){B}[A-Za-z]\b
    | (?!(?i:{ATTACHED})s?(?![A-Za-z]))[A-Za-z]{{1,2}}(?![A-Za-z]) | [A-Za-z]++(?:[0-9](?<!m[0-9])|\()
    | {CLOSING}(?:
        [0-9] | [+^] | [*/=×÷·<>≤≥≠≈~&]{B}(?:{NEXT}|[(\\]) | [<>≤≥]{B}[A-Za-z](?![A-Za-z])
        | /{B}[b-gi-kn-rt-zA-Z](?![A-Za-z]) | [-–—]{B}(?:{NEXT}|\(|[b-zA-HJ-Z](?![A-Za-z'’])) | \.\.+{B}[0-9]
        | \\(?!(?i:text|math|mbox|operatorname|q?quad|circ|degree|right|end|boxed|fbox|pounds|euro|big|because
            |implies|checkmark|square))[A-Za-z]
        | [,;]{B}(?:(?:and|or)\b)?(?:{MORE}{NEXT}|{B}(?:\.\.|…|\\[lc]?dots))
        | -?(?:{_one_of(*FUNCTIONS)}|pi|sqrt)(?:\b|[0-9])
        | (?:or|through|thru|plus|minus|divided|multiplied|squared|cubed|factorial|mod(?:ulo)?
            |lakh|crore|score|gross|base|{PARTS})\b
        | (?:to|and|x|times|versus|vs\.?|by|(?:out{B})?of|over|per|remainder|rem\.?|[rR]){MORE}{NEXT}
        | and{B}(?:a|an|one|two|three|up|above|over|below|under)\b
        | (?:more|less|fewer|greater|smaller){B}than\b
        | [b-fi-kn-rt-zXYZ](?![A-Za-z.'’])
        | -?(?:{COUNTED})(?:e?s)?[.,]?(?:[ \t]++|-)(?:and{B})?[0-9]
        | [A-Za-z]++(?:,{B}|,?{B}and|{B}(?:or|to)){MORE}{NEXT}
      )
    """,
    re.VERBOSE,
)
"""Text after a number that makes the number a part of something larger."""
NO_END = re.compile(rf"{CLOSING}(?:\.\.|…|\\[lc]?dots)")  # after decimals: dots that continue them

BEFORE = re.compile(rf"(?:{MARK}|[ \t\u00a0])+$")  # markup directly before a number
LEADS_IN = re.compile(
    rf"""(?:
    [0-9] | [A-Za-z)\]}}][-/] | [)\]}}]{B}[-+/^×÷·] | (?<![A-Za-z])[A-Za-z]{B}[+/^×÷·]
    | [0-9][%]?(?::|[ ]+:) | [0-9][%*_`$)}}\]]*{B}(?:[-–—+/^×÷·x~≤≥<>≈≠&,;]|\.\.+)
    | [0-9][%*_`$)}}\]]*{B}(?:(?:{COUNTED})(?:e?s)?{B})?(?:to|through|thru|(?:out{B})?of|over|per|x
        |remainder|rem\.?|[rR])
    | [0-9][%*_`$)}}\]]*{B}-?(?:{COUNTED})(?:e?s)?[.,]?
    | [0-9][’'′"″√∛] | [√∛] | (?<![A-Za-z])-?(?:{_one_of(*FUNCTIONS)}|sqrt)
    | [0-9]% | \b(?i:1|one){B}in | [0-9][%*_`$)}}\]]*,?{B}or{B}[A-Za-z]{B}=
    | \b(?i:step|example|exercise|equation|figure|{_one_of(*TENS)})
    | [0-9][%*_`$)}}\]]*{B}(?i:times|plus|(?:divided|multiplied){B}by)
    | \b(?i:twice|thrice|doubled?|triple|(?:{PARTS}|root|square|cube|log(?:arithm)?|factorial|reciprocal
        |inverse|opposite|multiple|percent|power|negative){B}of)
    | [0-9][%*_`$)}}\]]*{B}(?:[A-Za-z]++{B}|\\text\{{{B})?,?{B}(?:and|or|versus|vs\.?|by)
    | \b(?i:at{B}(?:least|most)|(?:more|less|fewer|greater|larger|smaller|higher|lower){B}than
        (?:{B}or{B}equal{B}to)?|over|above|below|under|up{B}to|except|exceeds?|between|versus)
    | (?i:\b(?:not|never|cannot)|n['’]t)(?:{B}[a-z]+){{0,2}} | [<>≤≥≠±]=? | !=
    | \\(?!(?i:boxed|fbox|text|math|q?quad|implies|approx|therefore|because|equiv|rightarrow|[,;:!]))[A-Za-z]+
        (?:{B}\[[^\]]*\])?(?:{B}\{{[^{{}}]*\}})*
    )$""",
    re.VERBOSE,
)
"""Text before a number that makes the number a part of something larger."""
CALLED = re.compile(r"[A-Za-z]\($")  # a function of the number
AFTER_SPACED_SIGN = re.compile(r"(?:[:=(#*>]|\b(?:is|are|was)|^)$")
"""Text after which a minus with a space behind it is a sign."""
BEFORE_OPERATOR = re.compile(
    r"(?:[0-9)\]}]|(?<![A-Za-z])[b-zB-HJ-Z])$"
)  # text after which a sign is an operator
