import pytest
import reasoning_gym

from tandem.data.files import count_rows, read_files
from tandem.errors import DataError
from tandem.rewards import Item, score
from tandem.tasks import ASKED_FOR_TAGS, parse

REFERENCE = "reasoning-gym:chain_sum?size=30&seed=7&min_terms=2&max_terms=3"


def problems() -> reasoning_gym.dataset.ProceduralDataset:
    return reasoning_gym.create_dataset("chain_sum", size=30, seed=7, min_terms=2, max_terms=3)


def test_rows_are_the_generators_problems():
    rows = parse(REFERENCE).rows()
    assert [row["reward_model"]["ground_truth"] for row in rows] == [p["answer"] for p in problems()]
    asked = [p["question"] + ASKED_FOR_TAGS for p in problems()]
    assert [row["prompt"][0]["content"] for row in rows] == asked
    text = parse(f"{REFERENCE}&answer=text").rows()
    assert text[3]["prompt"][0]["content"] == problems()[3]["question"]


def test_a_task_stands_where_a_file_may(tmp_path):
    files = read_files(REFERENCE, ["prompt", "data_source", "extra_info"], max_samples=12)
    assert len(files) == 12 and files.columns == ["prompt", "data_source", "extra_info"]
    assert count_rows([REFERENCE]) == 30
    assert count_rows(["reasoning-gym:chain_sum"]) == len(reasoning_gym.create_dataset("chain_sum")) == 500


@pytest.mark.parametrize("name", ["countdown", "word_sorting", "letter_counting", "family_relationships"])
def test_answers_are_scored_as_reasoning_gym_scores_them(name):
    task = parse(f"reasoning-gym:{name}?size=6&seed=3")
    original = reasoning_gym.create_dataset(name, size=6, seed=3)
    rows = task.rows()
    for number, problem in enumerate(original):
        other = original[(number + 1) % 6]["answer"]
        responses = {
            f"so <answer>no</answer> <answer> {problem['answer']} </answer>.": problem["answer"],
            f"<answer>{other}</answer>": other,
            f"{problem['answer']}": None,
        }
        given = problem["answer"], rows[number]["extra_info"], number
        items = [Item(f"reasoning-gym:{name}", text, *given) for text in responses]
        answers = responses.values()
        expected = [original.score_answer(answer.strip(), problem) if answer else 0.0 for answer in answers]
        assert [each.score for each in score(items)] == pytest.approx(expected)


def test_without_tags_the_whole_response_is_the_answer():
    rows = parse(f"{REFERENCE}&answer=text").rows()
    answer = rows[0]["reward_model"]["ground_truth"]
    items = [
        Item("reasoning-gym:chain_sum", text, answer, rows[0]["extra_info"]) for text in (f" {answer}\n", "x")
    ]
    assert [each.score for each in score(items)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reference", "telling"),
    [
        ("reasoning-gym:chain_sam", "remedy:   reasoning-gym:chain_sum"),
        ("reasoning-gym:", "no name"),
        ("reasoning-gym:chain_sum?size=0", "size=0"),
        ("reasoning-gym:chain_sum?size", "not a task"),
        ("reasoning-gym:chain_sum?answer=box", "answer=box"),
        ("reasoning-gym:chain_sum?max_turms=3", "max_turms"),
        ("reasoning-gym:chain_sum?min_terms=5&max_terms=2", "AssertionError"),
    ],
)
def test_a_reference_that_cannot_be_read_is_named(reference, telling):
    with pytest.raises(DataError) as caught:
        parse(reference).rows()
    assert reference in str(caught.value) and telling in str(caught.value)


def test_a_csv_file_is_read_by_its_first_line(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text('prompt,answer\n"1+1=",2\n"two\nlines",3\n')
    files = read_files(str(path), ["prompt", "answer"])
    assert files.take([1]) == [{"prompt": "two\nlines", "answer": "3"}]
    assert count_rows([str(path)]) == 2
    (tmp_path / "torn.csv").write_text('a,b\n1\n"')
    with pytest.raises(DataError, match="not a readable CSV file"):
        read_files(str(tmp_path / "torn.csv"), ["a"])
