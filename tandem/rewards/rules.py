"""Ready-made reward functions: rules for any text, to use alone or in a weighted sum.

You can name a rule in a config or pass it in Python. The arguments of a rule are the response and, passed by
keyword, columns of the data or values for all rows (`reward_kwargs`; `functools.partial` in Python). The
right answer is the column `answer`, or else the `ground_truth` of `reward_model`. The answer of a response is
the text in the last pair of tags with the name `tag`. Without tags it is the text after the last `</think>`,
or else the whole response. Each result has an explanation, `why`.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from typing import Any, Literal

import regex

from tandem.errors import RewardError
from tandem.rewards import gsm8k
from tandem.rewards.base import register_reward
from tandem.rewards.boxes import last_boxed
from tandem.rewards.instructions import instructions as instructions
from tandem.rewards.truths import truths
from tandem.texts import parse_json

MAX_EXPRESSION = 200  # the most characters of an expression; longer text is not parsed
MARKS = r"(?:[\s*_($\[{:]|\\(?:text|textbf|mathrm|mathbf|boxed)\b)*+"
CHOSEN = re.compile(rf"{MARKS}([A-Z])[\s*_$]*+(?:[)\]}}.:]|\Z)")
"""A single letter at the beginning of a line or a box."""
LETTER = r"([A-Z](?![\w'’])|[a-z](?=[)\].*_\s]*(?:\n|\Z)))"
NAMED = rf"(?:(?i:option|choice|letter|answer)\s+)?{MARKS}{LETTER}"
WILL_BE = (
    r"(?:is|(?:must|should|would|will|has\s+to)\s+be)\b"
    r"(?:\s+(?:most\s+)?(?:probably|likely|clearly|definitely))?"
)
ANNOUNCED = re.compile(
    r"(?i:(?<!wrong )(?<!incorrect )(?<!false )(?:\bans(?:wer)?(?:[\s*_]+(?:choice|option|letter))?"
    rf"(?:[\s*_]*[:=]|[\s*_]+[-–—]\s|[\s*_]+{WILL_BE}[\s*_]*:?)"
    rf"|\b(?:option|choice|letter)(?:[\s*_]+{WILL_BE}:?|[\s*_]*:))"
    rf"|(?<!not )\b(?:correct|right)(?:\s+(?:one|option|choice|answer|letter))?\s+{WILL_BE}:?"
    r"|\bI(?:\s+would|['’]d|\s+will|['’]ll)?\s+(?:choose|chose|pick|select|say|go\s+with|opt\s+for)"
    r"|\bI(?:['’]m|\s+am)\s+going\s+with|\bI\s+(?:think|believe)(?:\s+it(?:['’]s|\s+is))?(?=[\s*_(]+[A-HJ-Z](?![\w'’]))"
    r"|\bnot\s+[A-Z],?\s+but(?:\s+rather)?|答案\s*(?:是|为|[:：])|选[择项]?(?:是|为|[:：])?)"
    rf"{MARKS}(?:the\s+)?{NAMED}"
)
CALLED_RIGHT = re.compile(
    r"(?:^|[\n.!?;:,]|\b(?i:so|thus|hence|therefore))[\s*_(\[$]{0,9}+(?i:(?:the\s+)?(?:option|choice|answer)\s+)?"
    r"[*_(\[$]*([A-Z])[)\].*_$]*\s+is\s+(?:the\s+)?(?:only\s+)?(?:correct|right|best|true|(?:my|the)\s+(?:answer|choice|one))\b"
    r"(?:\s+(?:answer|option|choice|one)\b)?(?!\s*(?:\?|(?:,|and\b|or\b)[\s*_(]*[A-Z](?![\w'’])))"
)
CONCLUDED = re.compile(
    r"(?:\A|[\n.!?;:])[\s*_]*+(?i:(?:so|thus|hence|therefore)\b,?\s+(?:it(?:['’]s|\s+(?:is|must\s+be))\s+)?"
    rf"|it(?:['’]s|\s+(?:is|must\s+be))\s+){MARKS}([A-Z])[\s)\].!*_$]*\Z"
)
"""A last sentence that announces a single letter as the answer."""
OPTION = re.compile(r"(?i:\b(?:option|choice))[\s*_(\[]+([A-Z])(?![\w'])")
ANOTHER = re.compile(
    r"[\s*_)\]}.$]*+(?:,|/|&|or\b|and\b|(?:is|was)\s+(?:not|wrong|incorrect|false)\b)"
    r"(?:[\s*_(\[{$]*+[A-Z](?![\w'])(?!\s+(?:is|was)\b)|(?<=not)|(?<=wrong)|(?<=incorrect)|(?<=false))"
)
FENCED = re.compile(r"(?:```|~~~)[ \t]*(?i:jsonc?5?)?\s*(.*?)(?:```|~~~|\Z)", re.DOTALL)
TEMPLATE = re.compile(r"…|<[^<>]*>|[^<…]+|<")
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")  # a word, or a single Chinese or Japanese character
SIGNS = str.maketrans("×·⋅÷−–[]", "***/--()")
TEX_OPERATIONS = (
    (r"(?i)\A(?:(?:the\s+)?(?:final\s+)?(?:answer|expression)(?:\s+is|\s*:))", ""),
    (r"(?<=[\d)])\s*[xX]\s*(?=[\d(])", "*"),
    (r"\.\s*\Z", ""),
    (r"\\(?:times|cdot|ast)(?![A-Za-z])", "*"),
    (r"\\div(?![A-Za-z])", "/"),
    (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))"),
    (r"\\(?:left|right)(?![A-Za-z])|\\[()\[\],;! ]", " "),
)
OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def final(response: str, tag: str = "answer") -> str:
    """Return the text in the last pair of tags, else after the last `</think>`, else the whole response."""
    before, closed, _ = response.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside if closed and opened else response.rpartition("</think>")[2]


def _golds(answer: Any, reward_model: Mapping[str, Any] | None) -> list[str]:
    return truths((reward_model or {}).get("ground_truth") if answer is None else answer)


def _verdict(right: bool, why: str, **more: Any) -> dict[str, Any]:
    return {"score": float(right), "acc": float(right), "why": why, **more}


def _answered(right: bool, pred: object, golds: Sequence[str]) -> dict[str, Any]:
    pred = None if pred is None else str(pred)
    why = "no answer found" if pred is None else f"answer {pred:.200}, expected {' or '.join(golds):.200}"
    return _verdict(right, why, pred=pred)


@register_reward(bounded=True)
def exact(
    response: str,
    answer: Any = None,
    reward_model: Mapping[str, Any] | None = None,
    ignore_case: bool = False,
    tag: str = "answer",
) -> dict[str, Any]:
    """Return 1 if the response's answer equals a right answer, ignoring the amount of whitespace, else 0."""
    golds, pred = _golds(answer, reward_model), " ".join(final(response, tag).split())
    accepted = [" ".join(gold.split()) for gold in golds]
    right = pred.lower() in map(str.lower, accepted) if ignore_case else pred in accepted
    return _answered(right, pred or None, golds)


@register_reward(bounded=True)
def numeric(
    response: str,
    answer: Any = None,
    reward_model: Mapping[str, Any] | None = None,
    absolute: float = 0.0,
    relative: float = 0.0,
    tag: str = "answer",
) -> dict[str, Any]:
    """Return 1 if the response's answer is close enough to the right number, else 0.

    The answer may differ by `absolute`, or by `relative` times the right number. The answer is the last
    number in the last box, or in the text if there is no box.

    Raises:
        ValueError: The right answer is not a number.
    """
    golds, part = _golds(answer, reward_model), final(response, tag)
    pred = gsm8k.answer(last_boxed(part) or part, "flexible")
    limits = Decimal(str(absolute)), Decimal(str(relative))
    right = False
    for gold in golds:
        number = gsm8k.answer(gold, "flexible")
        if number is None:
            raise ValueError(f"the right answer {gold!r:.80} is not a number")
        right = right or (pred is not None and pred.near(number, *limits))
    return _answered(right, pred, golds)


@register_reward(bounded=True)
def choice(
    response: str,
    answer: Any = None,
    reward_model: Mapping[str, Any] | None = None,
    letters: str = "ABCDEFGHIJ",
    tag: str = "answer",
) -> dict[str, Any]:
    """Return 1 if the response chooses the right letter of a multiple-choice question, else 0.

    The right answer is a letter, or the number of the choice, counted from 0.

    Raises:
        ValueError: The right answer is neither a letter nor a number.
    """
    golds = []
    for gold in _golds(answer, reward_model):
        named = letters[int(gold) : int(gold) + 1] if gold.isdecimal() else _letter(gold)
        if not named or named not in letters:
            raise ValueError(f"the right answer {gold!r:.80} is not a letter of {letters}, nor its number")
        golds.append(named)
    pred = _letter(final(response, tag)[-gsm8k.MAX_TAIL_CHARACTERS :])
    return _answered(pred in golds, pred, golds)


def _letter(text: str) -> str | None:
    """Return the letter that a text chooses: boxed, alone, after "the answer is", or as the only letter."""
    boxed = last_boxed(text)
    alone = (boxed or text).strip(" \n()[].!*_$`")
    if len(alone) == 1 and alone.isalpha():
        return alone.upper()
    if boxed is not None:
        found = CHOSEN.match(boxed)
        return found and found.group(1)
    announced = [found for rule in (ANNOUNCED, CALLED_RIGHT, CONCLUDED) for found in rule.finditer(text)]
    if announced:
        last = max(announced, key=lambda found: found.start(1))
        return None if ANOTHER.match(text, last.end()) else last.group(1).upper()
    begun = (CHOSEN.match(line) for line in text.split("\n"))
    options = [*OPTION.finditer(text), *(line for line in begun if line)]
    if any(ANOTHER.match(each.string, each.end()) for each in options):
        return None
    named = {each.group(1) for each in options}
    return named.pop() if len(named) == 1 else None


@register_reward()
def matches(
    response: str, pattern: str, whole: bool = False, seconds: float = 1.0, tag: str = "answer"
) -> dict[str, Any]:
    """Return 1 if a regular expression (of the package `regex`) matches the answer, else 0.

    With `whole`, the expression must match the whole answer. A search that takes more than `seconds` is
    stopped and counts as no match.
    """
    part = final(response, tag).strip()
    search = regex.fullmatch if whole else regex.search
    try:
        found = search(pattern, part, timeout=seconds)
    except TimeoutError:
        return _verdict(False, f"the pattern took more than {seconds:g} s")
    outcome = f"found {found.group()!r:.200}" if found else "not found"
    return _verdict(bool(found), f"{outcome}; pattern {pattern:.200}")


@register_reward()
def json_schema(response: str, schema: Any, tag: str = "answer") -> dict[str, Any]:
    """Return 1 if the answer is JSON that is valid under a schema, else 0. Needs the package jsonschema.

    If the answer has fenced blocks (three backticks or tildes), the JSON is the content of the last block.

    Args:
        response: The response.
        schema: The schema, as a mapping or JSON text. Schemas that it refers to are not downloaded.
        tag: The tags around the answer.
    """
    try:
        checkers, registry = import_module("jsonschema"), import_module("referencing").Registry()
    except ModuleNotFoundError as error:
        raise RewardError("jsonschema is not installed", remedy="pip install 'tandem[schema]'") from error
    part = final(response, tag)
    try:
        value = parse_json((FENCED.findall(part) or [part])[-1].strip("\ufeff` \t\r\n"))
        json.dumps(value, allow_nan=False)  # NaN is not valid JSON
    except (ValueError, RecursionError) as error:
        return _verdict(False, f"no JSON: {error}")
    schema = parse_json(schema) if isinstance(schema, str) else schema
    checker = checkers.validators.validator_for(schema)
    checker.check_schema(schema)
    wrong = checkers.exceptions.best_match(checker(schema, registry=registry).iter_errors(value))
    return _verdict(not wrong, f"at {wrong.json_path}: {wrong.message}" if wrong else "the schema accepts it")


@register_reward(bounded=True)
def countdown(
    response: str,
    numbers: Sequence[int] | None = None,
    target: int | None = None,
    reward_model: Mapping[str, Any] | None = None,
    form: float = 0.0,
    tag: str = "answer",
) -> dict[str, Any]:
    """Return 1 if the answer is an expression that uses each number once and equals the target, else 0.

    An expression that uses each number once but has another value gets the score `form`. The expression may
    have +, -, *, / and brackets. Text after an equals sign is ignored.

    Args:
        response: The response.
        numbers: The numbers to use: a column, else an entry of the `ground_truth` of `reward_model`.
        target: The value to reach: a column, else an entry of the `ground_truth` of `reward_model`.
        reward_model: The column with the ground truth.
        form: The score of an expression that uses each number once but has another value.
        tag: The tags around the answer.
    """
    truth = (reward_model or {}).get("ground_truth") or {}
    numbers = truth["numbers"] if numbers is None else numbers
    target = truth["target"] if target is None else target
    text = _expression(final(response, tag))
    used: list[int] = []
    try:
        if len(text) > MAX_EXPRESSION:
            raise SyntaxError("too long")
        value = _value(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return _verdict(False, "no expression found")
    if Counter(used) != Counter(int(number) for number in numbers):
        return _verdict(False, f"uses {used}, of {list(numbers)}", pred=text)
    right = value == Fraction(str(target))
    found = _verdict(right, f"{text} is {value}, expected {target}", pred=text)
    return found if right else {**found, "score": form}


def _expression(part: str) -> str:
    """Convert an answer's expression to Python's notation, without markup and without "= value"."""
    text = (last_boxed(part) or part).strip(" \n\t*_`$").translate(SIGNS)
    for written, meant in TEX_OPERATIONS:
        text = re.sub(written, meant, text)
    sides = [
        side.strip(" \n\t*_`$.\\()" if side.strip(" ()").isdigit() else " \n\t*_`$")
        for side in text.split("=")
    ]
    return next((side for side in sides if not side.isdigit()), sides[0])


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("neither a number nor one of + - * /")


@register_reward(bounded=True)
def format(
    response: str, template: str = "<think>…</think><answer>…</answer>", prefilled: str = ""
) -> dict[str, Any]:
    """Return 1 if a response follows the template, else 0.

    The response must have the template's tags and other texts in the same order, and equally often. It must
    have text where the template has … (or ...), and nowhere else.

    Args:
        response: The response.
        template: The template.
        prefilled: The beginning of the response that the prompt already contains, such as `<think>`.
    """
    text, parts = prefilled + response, TEMPLATE.findall(template.replace("...", "…"))
    at, free = 0, False
    for part in (part.strip() for part in [*parts, ""]):
        if part == "…":
            free = True
            continue
        place = text.find(part, at) if part else len(text)
        shown = part or "the end"
        if place < 0 or (part and text.count(part) > template.count(part)):
            return {"score": 0.0, "why": f"{shown} is {'missing' if place < 0 else 'there too often'}"}
        if bool(text[at:place].strip()) != free:
            return {"score": 0.0, "why": f"{'no ' if free else ''}text before {shown}"}
        at, free = place + len(part), False
    return {"score": 1.0, "why": "matches the template"}


@register_reward(bounded=True)
def length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    least: int = 0,
    most: int | None = None,
    target: int | None = None,
    unit: Literal["tokens", "characters", "words"] = "tokens",
) -> list[dict[str, Any]]:
    """Return 0 for a response whose length is within the bounds, else a negative score, at least -1.

    The response must have at least `least` and at most `most` units, or exactly `target`. The negative score
    is minus the distance from the bound, as a fraction of the bound.

    The target follows Aggarwal & Welleck, "L1: Controlling How Long A Reasoning Model Thinks With
    Reinforcement Learning", arXiv 2503.04697.
    """
    least, most = (least, most) if target is None else (target, target)
    found = []
    for completion, ids in zip(completions, completion_ids, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        count = {"tokens": len(ids), "characters": len(text), "words": len(text.split())}[unit]
        bound = most if most is not None and count > most else max(count, least)
        missed = min(1.0, abs(count - bound) / max(1, bound))
        found.append({"score": 0.0 - missed, "why": f"{count} {unit}" + (f", not {bound}" if missed else "")})
    return found


@register_reward(bounded=True)
def repetition(response: str, size: int = 3) -> dict[str, Any]:
    """Return minus the fraction of a response's n-grams that occurred earlier in the response.

    The score is 0 if no sequence of `size` words occurs twice, and near -1 for endless repetition. Yeo et
    al., "Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv 2502.03373, appendix C.2, as a single
    score for the response.
    """
    words = WORD.findall(response.lower())
    count = len(words) - size + 1
    again = count - len(set(zip(*(words[at:] for at in range(size)), strict=False))) if count > 0 else 0
    return {
        "score": 0.0 - again / max(1, count),
        "why": f"{again} of {max(0, count)} {size}-grams are repeated",
    }


@register_reward(bounded=True)
def language(response: str, script: str | Sequence[str] = "Latin") -> dict[str, Any]:
    """Return the fraction of a response's letters that belong to a script; 1 without letters.

    DeepSeek-AI, "DeepSeek-R1", arXiv 2501.12948, uses a similar reward for the target language's fraction.

    Args:
        response: The response.
        script: The Unicode name of a script, such as Latin, Han or Cyrillic, or several names.
    """
    names = [script] if isinstance(script, str) else list(script)
    letters = len(regex.findall(r"\p{L}", response))
    of_script = "".join(rf"\p{{Script={name}}}" for name in names)
    own = len(regex.findall(rf"[[{of_script}]&&\p{{L}}]", response, regex.VERSION1))
    share = own / letters if letters else 1.0
    return {"score": share, "why": f"{own} of {letters} letters are {' or '.join(names)}"}
