from collections import Counter

import pyarrow.parquet as pa_parquet
import pytest

from tandem.data.prompts import PromptDataset
from tandem.data.sft import SFTDataset
from tandem.demo.model import build_tokenizer
from tandem.demo.problems import (
    DATA_SOURCE,
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    Problem,
    demonstrations,
    split,
    write_demonstrations,
    write_problems,
)
from tandem.rewards import Item, score


@pytest.mark.parametrize(
    ("problem", "working", "sloppy"),
    [
        (Problem(37, 65), "12,10=102", "12,9=92"),
        (Problem(37, 21), "8,5=58", "8,5=58"),
        (Problem(95, 95), "10,19=190", "10,18=180"),
        (Problem(64, 46), "10,11=110", "10,10=100"),
        (Problem(90, 10), "0,10=100", "0,10=100"),
        (Problem(99, 99), "18,19=198", "18,18=188"),
    ],
)
def test_working_by_hand(problem, working, sloppy):
    assert problem.working() == working
    assert problem.working(forget_carry=True) == sloppy
    assert problem.carries is (working != sloppy)
    assert len(problem.question) <= LONGEST_PROMPT
    assert len(working) + 1 <= LONGEST_RESPONSE


def test_the_reward_judges_the_working():
    problems = [Problem(first, second) for first in range(10, 100, 3) for second in range(10, 100, 7)]
    assert all(int(problem.answer) == problem.first + problem.second for problem in problems)
    right = [Item(DATA_SOURCE, problem.working(), problem.answer) for problem in problems]
    assert [scored.score for scored in score(right)] == [1.0] * len(problems)
    sloppy = [Item(DATA_SOURCE, problem.working(forget_carry=True), problem.answer) for problem in problems]
    assert [scored.score for scored in score(sloppy)] == [float(not p.carries) for p in problems]


def test_split_shares_no_sum_and_repeats_by_seed():
    parts = split(seed=3, train=4000, validation=600)
    train, validation = parts.train, parts.validation
    assert (len(set(train)), len(set(validation))) == (4000, 600)
    held_out = {frozenset(problem) for problem in validation}
    assert not held_out & {frozenset(problem) for problem in train}
    assert sum(problem.carries for problem in validation) == 400
    assert sum(problem.carries for problem in train) == 2667
    assert split(seed=3, train=4000, validation=600) == parts
    assert split(seed=4, train=4000, validation=600).validation != validation


def test_split_refuses_more_problems_than_there_are():
    with pytest.raises(ValueError, match=r"of 8000 problems can be drawn"):
        split(seed=0, train=8000, validation=100)


def test_demonstrations_forget_the_carry_as_often_as_asked():
    problems = split(seed=0, train=1000, validation=10).train
    rows = demonstrations(problems, seed=0, count=9500, forget_carry=0.8)
    assert len(rows) == 9500
    counts = Counter(problem for problem, _ in rows)
    assert counts.keys() == set(problems) and set(counts.values()) == {9, 10}
    carried = [(problem, text) for problem, text in rows if problem.carries]
    forgetful = [text == problem.working(forget_carry=True) for problem, text in carried]
    assert sum(forgetful) / len(forgetful) == pytest.approx(0.8, abs=0.02)
    right = [text == problem.working() for problem, text in carried]
    assert all(a != b for a, b in zip(right, forgetful, strict=True))
    assert all(text == problem.working() for problem, text in rows if not problem.carries)
    assert rows == demonstrations(problems, seed=0, count=9500, forget_carry=0.8)
    assert rows != demonstrations(problems, seed=1, count=9500, forget_carry=0.8)


def test_problem_file_is_in_the_users_format(tmp_path):
    problems = split(seed=0, train=30, validation=10).train
    path = tmp_path / "train.parquet"
    write_problems(path, problems, part="train")
    assert pa_parquet.read_table(path).to_pylist()[1] == {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": problems[1].question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problems[1].answer},
        "extra_info": {"split": "train", "index": 1, "question": problems[1].question}
        | {"answer": problems[1].working()},
    }
    tokenizer = build_tokenizer()
    dataset = PromptDataset(str(path), tokenizer, max_prompt_length=LONGEST_PROMPT)
    assert len(dataset) == 30
    batch = dataset.batch(range(30), uid_prefix="0")
    texts = [tokenizer.decode(row) for row in batch.ragged("prompts")]
    assert texts == [problem.question for problem in problems]
    assert list(batch.non_tensor_batch["ground_truth"]) == [problem.answer for problem in problems]


def test_demonstration_file_teaches_the_answer_and_its_end(tmp_path):
    rows = [("37+65?", "12,9=92"), ("12+13?", "5,2=25")]
    path = tmp_path / "sft.parquet"
    write_demonstrations(path, rows)
    tokenizer = build_tokenizer()
    dataset = SFTDataset(str(path), tokenizer, max_length=LONGEST_PROMPT + LONGEST_RESPONSE)
    for (question, answer), tokens, mask in zip(rows, dataset.tokens, dataset.response_mask, strict=True):
        assert tokenizer.decode(tokens[~mask]) == question
        assert tokenizer.decode(tokens[mask]) == answer + "<|endoftext|>"
