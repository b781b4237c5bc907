"""Check whether a response follows instructions, which have IFEval's names.

Zhou et al., "Instruction-Following Evaluation for Large Language Models", arXiv 2311.07911. Words are runs of
letters and digits. A sentence ends with a full stop, question mark or exclamation mark before a space. So
counts differ slightly from the counts of NLTK, which the paper's program uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.errors import RewardError
from tandem.rewards.base import register_reward
from tandem.texts import parse_json

LESS, AT_LEAST = "less than", "at least"
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


@register_reward(bounded=True)
def instructions(
    response: str, instruction_id_list: Sequence[str], kwargs: Sequence[Any] = (), partial: bool = False
) -> dict[str, Any]:
    """Return 1 if a response follows all instructions of its row, else 0.

    Args:
        response: The response.
        instruction_id_list: The names of the instructions, such as "keywords:existence".
        kwargs: The arguments of each instruction, as mappings or JSON text. Arguments that are None are
            ignored.
        partial: Whether to return the fraction of instructions that the response follows instead.

    Raises:
        RewardError: An instruction is unknown.
        TypeError: An instruction lacks an argument, or has an argument that it does not accept.
    """
    failed = []
    for place, name in enumerate(instruction_id_list):
        if name not in CHECKS:
            raise RewardError(
                "there is no check for this instruction",
                field="instruction_id_list",
                got=name,
                expected=f"one of {', '.join(sorted(CHECKS))}",
                remedy="remove such rows from the data",
            )
        given = kwargs[place] if place < len(kwargs) else {}
        named = parse_json(given) if isinstance(given, str) else given or {}
        named = {key: value for key, value in named.items() if value is not None}
        if not (response.strip() and CHECKS[name](response, **named)):
            failed.append(name)
    count = len(instruction_id_list)
    followed = (count - len(failed)) / max(1, count)
    return {
        "score": followed if partial else float(not failed),
        "acc": float(not failed),
        "followed": followed,
        "why": f"not followed: {', '.join(failed)}" if failed else f"all {count} followed",
    }


def _compared(count: int, relation: str, bound: int) -> bool:
    if relation not in (LESS, AT_LEAST):
        raise ValueError(f"the relation {relation!r} is neither {LESS!r} nor {AT_LEAST!r}")
    return count < bound if relation == LESS else count >= bound


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _sentences(text: str) -> int:
    return sum(bool(_words(part)) for part in re.split(r"[.!?]+(?=\s|\Z)", text))


def _parts(text: str, between: str) -> list[str]:
    """Return the texts between separators; empty text before the first or after the last does not count."""
    parts = [part.strip() for part in text.split(between)]
    return parts[not parts[0] : len(parts) - (len(parts) > 1 and not parts[-1])]


def _bullets(text: str) -> int:
    lines = map(str.strip, text.split("\n"))
    return sum(line.startswith("-") or re.match(r"\*[^*]", line) is not None for line in lines)


def _highlights(text: str) -> int:
    marked = re.findall(r"\*\*([^\n*]*)\*\*|\*([^\n*]*)\*", text)
    return sum(bool((one or two).strip()) for one, two in marked)


def _nth_begins(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    found = [part for part in text.split("\n\n") if part.strip()]
    if len(found) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    word = found[nth_paragraph - 1].split()[0].lower().lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0] == first_word.lower()


def _is_json(text: str) -> bool:
    fenced = re.fullmatch(r"\s*```(?:json)?(.*)```\s*", text, re.DOTALL | re.IGNORECASE)
    try:
        parse_json(fenced.group(1) if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str) -> bool:
    parts = _parts(text, "******")
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = map(re.escape, re.findall(r"\S", postscript_marker))
    return re.search(r"\s?".join(letters), text, re.IGNORECASE) is not None


CHECKS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(word.lower() in text.lower() for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation=AT_LEAST: _compared(
        text.lower().count(keyword.lower()), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation=AT_LEAST: _compared(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation=AT_LEAST: _compared(
        _sentences(text), relation, num_sentences
    ),
    "length_constraints:number_words": lambda text, num_words, relation=AT_LEAST: _compared(
        len(_words(text)), relation, num_words
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        all(parts := _parts(text, "***")) and len(parts) == num_paragraphs
    ),
    "length_constraints:nth_paragraph_first_word": _nth_begins,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: _bullets(text) == num_bullets,
    "detectable_format:constrained_response": lambda text: any(option in text for option in OPTIONS),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        _highlights(text) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter)}\s?\d", text)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda text: any(
        title.strip() for title in re.findall(r"<<([^<>\n]+)>>", text)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation=AT_LEAST: (
        _compared(sum(map(str.isupper, _words(text))), capital_relation, capital_frequency)
    ),
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
"""A dict from instruction to a function of text and arguments; it returns whether the text follows it."""
