import json
from collections import Counter

import pyarrow.parquet as pa_parquet
import pytest
import reasoning_gym

from tandem.cli.main import main
from tandem.data.prompts import PromptDataset
from tandem.demo import gym, program
from tandem.demo.gym import ARITHMETIC, GYMS, SLIPS, Gym, demonstrations, draw, phrases, question, slip
from tandem.demo.model import build_tokenizer
from tandem.observability.run import read_metrics
from tandem.rewards import Item, score

TASKS = sorted(GYMS)


@pytest.mark.parametrize("name", TASKS)
def test_problems_are_the_generators_and_fit(name, tmp_path):
    train, validation = draw(name, seed=3, train=1500, validation=200)
    asked = [question(row) for row in validation]
    assert len(set(asked)) == 200 and not set(asked) & {question(row) for row in train}
    made = GYMS[name]
    parameters = dict(pair.split("=") for pair in made.parameters.split("&"))
    values = {key: json.loads(value) for key, value in parameters.items()}
    original = reasoning_gym.create_dataset(name, size=1700, seed=3 * 1700, **values)
    for row in (*train[:50], *validation[:50]):
        problem = original[row["extra_info"]["index"]]
        assert question(row) == problem["question"]
        assert row["reward_model"]["ground_truth"] == problem["answer"]
    path = tmp_path / "rows.parquet"
    program.write_rows(path, train + validation)
    tokenizer = build_tokenizer(phrases(train))
    assert len(PromptDataset(str(path), tokenizer, max_prompt_length=made.prompt)) == len(train + validation)
    answers = [row["reward_model"]["ground_truth"] for row in train + validation]
    assert max(len(tokenizer(answer).input_ids) for answer in answers) + 1 <= made.response


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_right_and_seldom_the_same_and_slips_are_wrong(name):
    rows, validation = draw(name, seed=0, train=1000, validation=256)
    common = Counter(row["reward_model"]["ground_truth"] for row in validation).most_common(1)
    assert common[0][1] <= 0.1 * 256
    for change, right in ((str, 1), (slip, 0)):
        answers = [(change(row["reward_model"]["ground_truth"]), row) for row in rows]
        items = [Item(row["data_source"], answer, "", row["extra_info"]) for answer, row in answers]
        assert {float(each.score >= 1) for each in score(items)} == {float(right)}


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        *[("9 4 1 1", "9 4 1 3"), ("2 1 5 1", "2 1 1 5"), ("7 6\n1 4", "7 6\n4 1"), ("-12", "-10")],
        *[("9", "11"), ("neon", "neno"), ("noraA", "nora"), ("a", ""), ("['1.0', '2.0']", "['2.0', '1.0']")],
    ],
)
def test_slips_by_hand(answer, wrong):
    assert slip(answer) == wrong


def test_phrases_are_what_all_questions_share():
    rows, _ = draw("spell_backward", seed=0, train=100, validation=10)
    assert phrases(rows) == ["Spell this word backward (example: sun -> nus): "]
    tokenizer = build_tokenizer(phrases(rows))
    ids = tokenizer(question(rows[0])).input_ids
    assert len(ids) == 1 + len(rows[0]["reward_model"]["ground_truth"])
    assert tokenizer.decode(ids) == question(rows[0])
    m = " and then, as before, "
    for texts, shared in (
        (("ask 12 now", "ask 34 now", "ask 5 now"), ["ask ", " now"]),
        ((f"sort 1{m}up.", f"sort 22{m}down.", f"sort 3,4{m}up."), ["sort ", m]),  # "." is already a token
        (("a 1 then b", "c 2 then d"), []),
    ):
        assert phrases([{"prompt": [{"content": text}]} for text in texts]) == shared


def test_demonstrations_slip_as_often_as_said():
    rows, _ = draw("spell_backward", seed=0, train=500, validation=10)
    shown = demonstrations(rows, seed=0, count=4000)
    truths = {question(row): row["reward_model"]["ground_truth"] for row in rows}
    slipped = [answer != truths[asked] for asked, answer in shown]
    assert all(answer in (truths[asked], slip(truths[asked])) for asked, answer in shown)
    assert sum(slipped) / 4000 == pytest.approx(SLIPS, abs=0.03)
    assert shown == demonstrations(rows, seed=0, count=4000) != demonstrations(rows, seed=1, count=4000)


def test_a_wrong_name_is_told_the_close_one(capsys):
    assert main(["demo", "spel_backward"]) == 1
    said = capsys.readouterr().err
    assert "got:      spel_backward" in said and "remedy:   tandem demo spell_backward" in said


def test_without_reasoning_gym_the_remedy_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tandem.tasks.find_spec", lambda name: None)
    assert main(["demo", "spell_backward", "--out", str(tmp_path), "--seed", "77"]) == 1
    assert "pip install 'tandem[tasks]'" in capsys.readouterr().err
    assert main(["demo", "spell_backward", "--out", str(tmp_path), "--algo", "dqn"]) == 1
    assert "grpo or ppo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "control"),
    [
        (("trainer.test_freq=2",), "none"),
        pytest.param(("--algo", "ppo"), "shuffled-rewards", marks=pytest.mark.slow),
    ],
)
def test_a_short_run(words, control, tmp_path, monkeypatch, capsys):
    made = GYMS["spell_backward"]
    short = Gym(made.parameters, made.prompt, made.response, warm_up=3, steps=2)
    monkeypatch.setitem(gym.GYMS, "spell_backward", short)
    monkeypatch.setattr(program, "TRAIN_PROBLEMS", 600)
    monkeypatch.setattr(program, "GYM_VALIDATION", 24)
    small = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    out = ("--out", str(tmp_path), "--control", control)
    critic = ("critic.ppo_mini_batch_size=16",) if "ppo" in words else ()
    assert main(["demo", "spell_backward", *words, *out, *small, *critic]) == 0
    said = capsys.readouterr().out
    assert "accuracy on 24 problems it never trained on: 0.0" in said
    assert "tandem demo spell_backward --algo ppo" in said and "reasoning-gym:spell_backward?" in said
    run = tmp_path / ("run" if control == "none" else f"run_{control}")
    assert max(row["step"] for row in read_metrics(run / "metrics.jsonl")) == 2
    assert pa_parquet.read_table(tmp_path / "demonstrations.parquet").num_rows == 3 * program.SFT_BATCH


def test_words_with_an_equals_sign_are_overrides_of_arithmetic(monkeypatch):
    given: list[dict[str, object]] = []
    monkeypatch.setattr(program, "run_demo", lambda out, **kwargs: given.append({"out": out, **kwargs}))
    assert main(["demo", "trainer.save_freq=7", "trainer.test_freq=1"]) == 0
    assert main(["demo", "spiral_matrix", "trainer.save_freq=7"]) == 0
    assert [each["task"] for each in given] == [ARITHMETIC, "spiral_matrix"]
    assert given[0]["overrides"] == ["trainer.save_freq=7", "trainer.test_freq=1"]
    assert given[1]["overrides"] == ["trainer.save_freq=7"]
    assert [str(each["out"]) for each in given] == ["runs/demo", "runs/demo_spiral_matrix"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TASKS[::3])  # benchmarks/demo_tasks.py measures all of them
def test_a_task_is_learnt(name, tmp_path):
    said: list[str] = []
    done = program.run_demo(
        tmp_path, task=name, algorithm="grpo", seed=0, control="none", ranks=1, overrides=[], say=said.append
    )
    print(f"{name}: {done.before:.3f} before, {done.after:.3f} after, in {done.seconds:.0f} s")
    assert done.after >= done.before + 0.2
    assert f"{done.before:.3f} before, {done.after:.3f} after" in said[-1]
