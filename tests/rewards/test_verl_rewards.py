"""The results of verl 0.9.1's reward functions: its column of odd formats, and scores on plain responses."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs.odd_formats import FORMS, ODD
from tandem.rewards import Item, score

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "verl" / "bin" / "python"
SEARCH = {"target": ["Paris", "the city of Paris"]}
DAPO = ("math_dapo", "math", "math_dapo_reasoning", "aime2024")
SOURCES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
PLAIN: list[tuple[str, str, Any]] = [
    ("openai/gsm8k", "3*24=72\n#### 72", "72"), ("openai/gsm8k", "#### 71", "72"),
    ("openai/gsm8k", "it is 72", "72"), ("lighteval/MATH", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{0.5}", r"\frac{1}{2}"),
    ("HuggingFaceH4/MATH-500", r"\boxed{3}", "4"),
    *((source, response, "34") for source in DAPO for response in (
        "so\nAnswer: 34", "Answer: 33\nAnswer: $34$", "Answer: 33", r"so \boxed{34}", r"so \boxed{33}",
        r"\boxed{34}. Answer: 33", "Answer: 34" + "." * 400, "nothing", "",
    )),
    *((f"numina_{part}", r"\boxed{x^2+1}", "1+x^2") for part in ("aops_forum", "synthetic_math", "amc_aime")),
    *((f"numina_{part}", r"\boxed{7}", "8") for part in ("synthetic_amc", "cn_k12", "olympiads")),
    *(("hiyouga/geometry3k", response, "35") for response in (
        r"<think>a</think>\boxed{35}", r"<think>a</think>\boxed{36}", r"\boxed{35}", "35",
        r" <think>a</think>\boxed{35}",
    )),
    *((f"searchR1_{part}", response, SEARCH) for part in SOURCES for response in (
        "<answer>paris.</answer>", "<answer>City of  Paris</answer>", "<answer>London</answer>", "Paris",
        "<answer>London</answer><answer>The Paris</answer>", "<answer>in Paris</answer>",
        "<answer>x</answer>" * 10 + "<answer>Paris</answer>",
    )),
]  # fmt: skip


def scores_of_verl(cases, folder):
    (folder / "in.json").write_text(json.dumps(cases), encoding="utf-8")
    script = ROOT / "benchmarks" / "peers" / "verl_rewards.py"
    command = [PYTHON, script, folder / "in.json", folder / "out.json"]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    found = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return found


def test_the_column_of_verl(tmp_path):
    cases = [[source, odd.response(source), odd.truth] for odd in ODD for source in FORMS]
    found = iter(scores_of_verl(cases, tmp_path))
    for odd in ODD:
        marks = [str(int((next(found) or 0) >= 1)) for _ in FORMS]
        shown = ["-" if own == "-" else mark for mark, own in zip(marks, odd.tandem, strict=True)]
        assert "".join(shown) == odd.verl, odd


def test_plain_responses_get_the_scores_of_verl(tmp_path):
    found = scores_of_verl(PLAIN, tmp_path)
    unscored = {case[0] for case, theirs in zip(PLAIN, found, strict=True) if theirs is None}
    assert unscored <= {"hiyouga/geometry3k"}  # verl needs mathruler for this source
    for case, theirs in zip(PLAIN, found, strict=True):
        if theirs is not None:
            assert score([Item(*case)])[0].score == pytest.approx(theirs), case
