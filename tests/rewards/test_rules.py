import functools
import json
import random
import time
from collections import Counter

import pytest

from tandem.api.arguments import reward_keys
from tandem.config.rewards import CustomRewardConfig, RewardConfig
from tandem.rewards import Item, Pool, Scored, own_reward, rules, score
from tests.rewards.test_instructions import KEPT
from tests.support.refusing import refused


def right(found):
    assert found["score"] == found["acc"]
    return bool(found["score"])


@pytest.mark.parametrize(("response", "chosen"), [
    *((text, "B") for text in (
        "B", "(b)", "b.", " B \n", "**B**", "B) Paris", "**B) Paris**", "$B$", "Answer: B", "**Answer:** B",
        "**Answer**: B", "the answer is b", "ANSWER = B", "The answer is (B).", "the answer would be B,",
        "The answer is option B because", r"so \boxed{B}", r"\boxed{\text{(B)}}", r"\boxed{B. Paris}",
        "Option B",
    )),
    ("<think>A or C? The answer is C</think>B", "B"), ("Answer: C <answer>B</answer>", "B"),
    ("The answer is A. No, the answer is B.", "B"), ("The answer is B since option C is wrong", "B"),
    ("B. Paris\n\nBecause Paris is the capital.", "B"), ("A) x\nB) y\nI like both", None), ("A or B", None),
    ("The answer is A or B", None), ("Answer: A, B", None), ("Answer: (A) and (B)", None),
    ("The answer is not B", None), ("the answer is a dog", None), ("I think so", None),
    ("A dog is no answer", None), (r"\boxed{Paris}", None), ("", None),
])  # fmt: skip
def test_choice(response, chosen):
    assert rules.choice(response, "B")["pred"] == chosen
    assert right(rules.choice(response, "B")) == (chosen == "B") and not right(rules.choice(response, "D"))


def test_choice_names_its_truth():
    assert all(right(rules.choice("C", truth)) for truth in ("C", "(c)", "C. Rome", 2, "2"))
    assert rules.choice("no", "C")["why"] == "no answer found"
    for truth in ("7", "Z", "Rome"):
        with pytest.raises(ValueError, match="letter of ABCD"):
            rules.choice("C", truth, letters="ABCD")


@pytest.mark.parametrize(("response", "truth", "limits", "expected"), [
    ("so 3.14", "3.14159", {"absolute": 0.01}, True), ("so 3.14", "3.14159", {"absolute": 0.001}, False),
    ("990", 1000, {"relative": 0.01}, True), ("989.9", 1000, {"relative": 0.01}, False),
    ("-990", -1000, {"relative": 0.01}, True), ("990", -1000, {"relative": 0.01}, False),
    ("1/3", "0.3333", {"relative": 0.001}, True), ("$1,234.50", "1234.5", {}, True),
    (r"7 or \boxed{8}, not 9", "8", {}, True), ("8 <answer>7</answer>", "8", {}, False),
    ("10000000000000000000000000000001", "10000000000000000000000000000000", {}, False),
    ("8", ["7", "8"], {}, True), ("none", "8", {"absolute": 100}, False),
])  # fmt: skip
def test_numeric(response, truth, limits, expected):
    assert right(rules.numeric(response, truth, **limits)) is expected
    assert right(rules.numeric(response, None, {"ground_truth": truth}, **limits)) is expected


def test_exact():
    assert right(rules.exact("<think>hm</think>\n New  York\n", "New York"))
    assert right(rules.exact("why <answer>b</answer>", ["a", "b"]))
    assert not right(rules.exact("new york", "New York"))
    assert right(rules.exact("new york", "New York", ignore_case=True))
    assert rules.exact("Rome", "Paris")["why"] == "answer Rome, expected Paris"
    refused(ValueError, lambda: rules.exact("x"), "neither text")
    refused(ValueError, lambda: rules.numeric("5", "x"), "right answer 'x' is not a number")


def test_patterns_that_backtrack_for_ever_end():
    assert right(rules.matches("the year 1984.", r"\b\d{4}\b"))
    assert not right(rules.matches("the year 1984.", r"\d{4}", whole=True))
    found = rules.matches("a" * 5000 + "!", r"(a|a)+b", seconds=0.2)
    assert found["score"] == 0 and found["why"] == "the pattern took more than 0.2 s"


SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}


@pytest.mark.parametrize(("response", "telling"), [
    ('{"a": 1}', ""),
    ('so:\n```json\n{"a": "x"}\n```\nno:\n```json\n{"a": 1}\n```', ""),
    ('<answer>{"a": 1}</answer>', ""), ('{"a": "x"}', "at $.a: 'x' is not of type 'number'"),
    ("{}", "at $: 'a' is a required property"), ("{", "no JSON: "), ("[" * 100_000, "no JSON: "),
    ("", "no JSON: "),
])  # fmt: skip
def test_json_schema(response, telling):
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        found = rules.json_schema(response, schema)
        assert right(found) == (not telling) and telling in found["why"]
    refused(Exception, lambda: rules.json_schema("1", {"$ref": "http://localhost:1/s.json"}), "Unresolvable")


@pytest.mark.parametrize(("response", "score_", "telling"), [
    ("<answer>(3+5)*3 = 24</answer>", 1.0, "(3+5)*3 is 24, expected 24"),
    (r"\boxed{(3 + 5) × 3}", 1.0, "is 24"), ("3*3+5", 0.1, "3*3+5 is 14, expected 24"),
    ("3*5", 0.0, "uses [3, 5], of [3, 3, 5]"), ("24", 0.0, "uses [24]"), ("3*3*5-3-3", 0.0, "uses"),
    ("3**3-5", 0.0, "no expression found"), ("3//3+5", 0.0, "no expression found"),
    ("5/(3-3)", 0.0, "no expression found"), ("__import__('os').getcwd()", 0.0, "no expression found"),
    ("3.0+3+5", 0.0, "no expression found"), ("(" * 99 + "3" + ")" * 99, 0.0, "uses [3]"),
    ("(" * 5000, 0.0, "no expression found"), ("-" * 190 + "3+3+5", 0.1, "is 11"),
    ("I do not know", 0.0, "no expression found"),
])  # fmt: skip
def test_countdown(response, score_, telling):
    found = rules.countdown(response, [3, 3, 5], 24, form=0.1)
    assert found["score"] == score_ and telling in found["why"]
    truth = {"ground_truth": {"numbers": [3, 3, 5], "target": 24}}
    assert rules.countdown(response, reward_model=truth, form=0.1) == found
    assert rules.countdown("8/(3-8/3)", [8, 3, 8, 3], 24)["score"] == 1.0  # exact fractions


FORM = "<think>a</think><answer>b</answer>"


@pytest.mark.parametrize(("response", "why"), [
    (FORM, "matches the template"), ("\n<think>a</think>\n <answer>b</answer>\n", "matches the template"),
    ("<think>a</think>c<answer>b</answer>", "text before <answer>"), ("", "<think> is missing"),
    ("<think> </think><answer>b</answer>", "no text before </think>"), (FORM + "more", "text before the end"),
    ("<answer>b</answer>", "<think> is missing"), (FORM + FORM, "<think> is there too often"),
    ("<answer>b</answer><think>a</think>", "text before <think>"),
    ("<think>a<think></think><answer>b</answer>", "<think> is there too often"),
])  # fmt: skip
def test_format(response, why):
    assert rules.format(response) == {"score": float(why == "matches the template"), "why": why}


def test_other_templates():
    assert rules.format("a</think><answer>b</answer>", prefilled="<think>")["score"] == 1
    assert rules.format("hm\nAnswer: 3", template="...Answer: …")["score"] == 1
    assert rules.format("Answer: 3", template="…Answer: …")["why"] == "no text before Answer:"
    assert rules.format("Answer: 3", template="Answer: …")["score"] == 1


def test_length():
    texts = ["abcd ef", [{"role": "assistant", "content": ""}], "x" * 300]
    ids = [[1, 2, 3], [], [1] * 300]

    def scores(**bounds):
        return [found["score"] for found in rules.length(texts, ids, **bounds)]

    assert scores() == [0, 0, 0] and scores(most=200) == [0, 0, -0.5]
    assert scores(most=100) == [0, 0, -1] and scores(least=4) == [-0.25, -1, 0]
    assert scores(target=4) == [-0.25, -1, -1] and scores(target=2, unit="words") == [0, -1, -0.5]
    assert scores(most=4, unit="characters") == [-0.75, 0, -1]
    assert rules.length(texts, ids, most=200)[2]["why"] == "300 tokens, not 200"


def test_repetition_against_counting():
    chance = random.Random(5)
    for _ in range(50):
        words = [chance.choice("abc") for _ in range(chance.randrange(12))]
        size = chance.randrange(1, 4)
        grams = Counter(tuple(words[at : at + size]) for at in range(len(words) - size + 1))
        again = sum(count - 1 for count in grams.values())
        expected = -again / sum(grams.values()) if grams else 0.0
        assert rules.repetition(" ".join(words), size)["score"] == pytest.approx(expected)
    assert rules.repetition("你好你好你好")["score"] == -0.5


@pytest.mark.parametrize(("response", "script", "share"), [
    ("héllo мир", "Latin", 5 / 8), ("мир 你", ["Cyrillic", "Han"], 1), ("12 + 3", "Latin", 1),
    ("ひらカタ漢字", ("Han", "Hiragana", "Katakana"), 1), ("abc", "Greek", 0),
])  # fmt: skip
def test_language(response, script, share):
    assert rules.language(response, script)["score"] == pytest.approx(share)


HOSTILE = [
    "[", "<<", "**", "***", '"', "\n", " ", "-\n", "(", "\\boxed{", "answer is ", "```", "<answer>", "a.",
    "9", "P. ",
]  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE)
def test_bounded_rules_take_little_time_on_any_text(unit):
    text = (unit * 100_000)[:100_000]
    start = time.process_time()
    for name, (arguments, _, _) in KEPT.items():
        rules.instructions(text, [name], [arguments])
    for function in (rules.choice, rules.numeric, rules.exact):
        function(text, "1")
    rules.countdown(text, [1], 1)
    rules.format(text)
    rules.length([text], [[1]])
    rules.repetition(text)
    rules.language(text)
    assert time.process_time() - start < 3


def terms(*given):
    rows = [{"path": "tandem.rewards.rules", **each} for each in given]
    return CustomRewardConfig.model_validate({"terms": rows})


ITEM = Item("x", "It is 7.", None, columns={"prompt": "3+4=", "answer": "7"}, uid="u", token_ids=[1, 2, 3, 4])
WHY = "numeric: answer 7, expected 7; length: 4 tokens, not 8; repetition: 0 of 1 3-grams are repeated"
EXTRA = {"acc": 1.0, "numeric": 1.0, "length": -0.5, "repetition": 0.0}
EXPECTED = Scored(1.0 - 0.1 * 0.5, EXTRA, "7", True, why=WHY)


def test_rules_are_summed_from_a_config():
    length = {"name": "length", "weight": 0.1, "reward_kwargs": {"target": 8}}
    own = own_reward(terms({"name": "numeric"}, length, {"name": "repetition"}))
    assert own is not None and own.reads.needs == ("prompt",) and all(part.bounded for part in own.parts)
    (found,) = Pool(own, RewardConfig()).score([ITEM])
    assert found == EXPECTED and found.right


def test_rules_come_from_python(tmp_path):
    rewards = {rules.numeric: 1.0, functools.partial(rules.length, target=8): 0.1, rules.repetition: 1}
    keys = {name.split(".", 1)[1]: value for name, value in reward_keys(rewards, tmp_path).items()}
    own = own_reward(CustomRewardConfig.model_validate(keys))
    assert own is not None and all(part.bounded for part in own.parts)
    assert score([ITEM], own) == [EXPECTED]


def test_two_rules_of_one_name_are_told_apart_by_labels():
    patterns = [{"name": "matches", "label": f"has {x}", "reward_kwargs": {"pattern": x}} for x in "7x"]
    (found,) = score([ITEM], own_reward(terms(*patterns)))
    assert found.extra["has 7"] == 1 and found.extra["has x"] == 0


@pytest.mark.parametrize(
    ("name", "needs"),
    [("matches", "pattern"), ("json_schema", "schema"), ("instructions", "instruction_id_list")],
)
def test_what_a_rule_lacks_is_missing_before_it_is_called(name, needs):
    own = own_reward(terms({"name": name}))
    assert own is not None and own.reads.needs == ("prompt", needs)
