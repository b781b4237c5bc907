from typing import Any

import pytest

from tandem.errors import RewardError
from tandem.rewards import rules
from tandem.rewards.instructions import CHECKS

KEPT: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "keywords:existence": ({"keywords": ["Sun", "moon"]}, ["the sun, the Moon"], ["the sun"]),
    "keywords:frequency": ({"keyword": "ha", "frequency": 2}, ["Ha ha", "haha ha"], ["ha"]),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, ["category"], ["a Cat!"]),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 3, "let_relation": "less than"},
        ["Eel"],
        ["eerie"],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        ["One is 1.5. Two!", "A? B. C"],
        ["One...", "1.5 and 2.5"],
    ),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, ["two words"], ["a b c"]),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2}, ["a\n***\nb", "***a***b***"], ["a", "a***b***c", "a******b"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        ["a\n\n'then, b"],
        ["then\n\nb", "a\n\nb\n\nthen"],
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, ["[a] b [c]"], ["[a] b"]),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, ["x\np. s. y"], ["ps"]),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2}, ["* a\n- b\n**c**"], ["* a", "- a\n- b\n- c"],
    ),
    "detectable_format:constrained_response": ({}, ["My answer is no."], ["No."]),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2}, ["*a* and **b**"], ["*a* b", "** ** *a*"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2}, ["Section 1\na\nSection 2\nb"], ["Section 1\na"],
    ),
    "detectable_format:json_format": ({}, ['```json\n{"a": 1}\n```', "[1]"], ["{a}", "x [1]"]),
    "detectable_format:title": ({}, ["<<a title>>\nb"], ["<a>", "<< >>"]),
    "combination:two_responses": ({}, ["a\n******\nb"], ["a", "a******a", "a******b******c"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi"}, ["say hi\nhi"], ["hi"]),
    "startend:end_checker": ({"end_phrase": "The end."}, ['so "the end."'], ["the end. Or not"]),
    "startend:quotation": ({}, ['"a"'], ['"a', '"']),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"}, ["GO NOW!"], ["GO now"],
    ),
    "change_case:english_capital": ({}, ["GO!"], ["Go!"]),
    "change_case:english_lowercase": ({}, ["go!"], ["Go!"]),
    "punctuation:no_comma": ({}, ["a b"], ["a, b"]),
}  # fmt: skip


def test_every_check_has_a_case():
    assert KEPT.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", KEPT)
def test_instructions(name):
    arguments, kept, broken = KEPT[name]
    padded = {**dict.fromkeys(("num_words", "language")), **arguments}  # as in Arrow's structs
    for text in kept:
        assert rules.instructions(text, [name], [padded])["why"] == "all 1 followed", text
    for text in [*broken, "", " "]:
        found = rules.instructions(text, [name], [padded])
        assert (found["score"], found["why"]) == (0.0, f"not followed: {name}"), text


def test_several_instructions():
    both = ["punctuation:no_comma", "keywords:existence"]
    arguments = ["{}", '{"keywords": ["b"]}']
    assert rules.instructions("a b", both, arguments)["score"] == 1
    assert rules.instructions("a, b", both, arguments)["score"] == 0
    assert rules.instructions("a, b", both, arguments, partial=True)["score"] == 0.5
    with pytest.raises(RewardError, match="no check") as caught:
        rules.instructions("a", ["language:response_language"], [{"language": "de"}])
    assert caught.value.got == "language:response_language"
    with pytest.raises(ValueError, match="the relation 'about'"):
        rules.instructions("a", ["length_constraints:number_words"], [{"num_words": 1, "relation": "about"}])
