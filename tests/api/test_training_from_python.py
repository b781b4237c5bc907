import asyncio

import pytest

import tandem
from tandem.api.arguments import reward_keys
from tandem.errors import ConfigError, TandemError
from tests.support.tiny import make_model
from tests.support.warm import cold

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "hint": "sum"} for a in range(5) for b in range(5)]
SETTINGS = {
    "actor_rollout_ref.actor.optim.lr": 0.01,
    "actor_rollout_ref.rollout.n": 4,
    "data.max_response_length": 4,
    "data.train_batch_size": 5,
    "trainer.logger": [],
}


def digits(prompt, response, answer, **columns):
    assert prompt.endswith("=") and columns["hint"] == "sum"
    return sum(c.isdigit() for c in response) / 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def settings(request):
    if request.param == "local":
        return SETTINGS
    request.getfixturevalue("ray_cluster")
    return {**SETTINGS, "trainer.n_gpus_per_node": 2}


def test_a_run_from_start_to_end(model, tmp_path):
    heard = []
    run = tandem.train(
        model, train=ROWS, val=ROWS[:4], rewards=digits, steps=3, out=tmp_path / "run", config=SETTINGS,
        on_step=lambda number, metrics: heard.append((number, metrics["reward/mean"])),
    )  # fmt: skip
    assert run.state == "finished" and run.steps == 3
    assert heard == run.curve("reward/mean")
    samples = run.samples(step=2)
    assert len(samples) == 20
    assert all(s["score"] == sum(c.isdigit() for c in s["response"]) / 4 for s in samples)
    assert run.samples(step=2)[0]["prompt"].endswith("=")
    assert (run.export(tmp_path / "exported") / "config.json").is_file()
    assert tandem.open(tmp_path / "run").best == run.best


def test_the_weight_of_an_only_reward_counts(tmp_path):
    (term,) = reward_keys({digits: 0.5}, tmp_path)["custom_reward_function.terms"]
    assert (term["name"], term["weight"]) == ("digits", 0.5)
    assert reward_keys({digits: 1.0}, tmp_path)["custom_reward_function.name"] == "digits"


@pytest.mark.slow
def test_weighted_rewards_are_summed_and_told_apart(model, tmp_path):
    def length(prompts, responses):
        return [float(len(text)) for text in responses]

    def lone(prompt, responses, answer):
        assert len(responses) == 4
        return [None if i else 8.0 for i in range(4)]

    rewards = {digits: 1.0, length: -0.5, lone: 0.25}
    run = tandem.train(model, train=ROWS, rewards=rewards, steps=1, out=tmp_path / "run", config=SETTINGS)
    for number, sample in enumerate(run.samples(step=1)):
        own = sum(c.isdigit() for c in sample["response"]) / 4
        first = 2.0 if number % 4 == 0 else 0.0
        assert sample["score"] == pytest.approx(own - 0.5 * len(sample["response"]) + first)
        assert sample["extra"]["digits"] == own and sample["extra"]["length"] == len(sample["response"])


@pytest.mark.slow
def test_a_trainer_pauses_answers_and_goes_on(model, tmp_path, settings):
    own = {"val": ROWS[:4], "rewards": digits, "steps": 4, "out": tmp_path / "run", "config": settings}
    with tandem.Trainer(model, train=ROWS, **own) as trainer:
        seen = []
        for step in trainer:
            seen.append(step.number)
            if step.number == 2:
                break
        before = trainer.generate(["1+1=", "2+2="], n=3)
        assert [len(texts) for texts in before] == [3, 3]
        greedy = trainer.generate(["1+1="], greedy=True)
        assert trainer.generate(["1+1="], greedy=True) == greedy
        assert 0 <= trainer.evaluate()["val/reward"] <= 1
        for step in trainer:
            seen.append(step.number)
            break
    assert seen == [1, 2, 3]
    assert list(trainer.run.checkpoints) == [3]  # closing the trainer saved it
    with pytest.raises(ConfigError, match="closed"):
        next(iter(trainer))
    again = tandem.train(model, train=ROWS, **own)
    assert [row["step"] for row in again.metrics] == [0, 1, 2, 3, 4]


def test_a_changed_reward_is_named_when_a_run_goes_on(model, tmp_path):
    def first(prompt, response):
        return 1.0

    def second(prompt, response):
        return 2.0

    second.__name__ = "first"
    tandem.train(model, train=ROWS, rewards=first, steps=1, out=tmp_path / "run", config=SETTINGS)
    with pytest.raises(ConfigError, match=r"custom_reward_function.path .*first-\w+.pkl"):
        tandem.train(model, train=ROWS, rewards=second, steps=2, out=tmp_path / "run", config=SETTINGS)


@pytest.mark.slow
def test_it_runs_inside_an_event_loop(model, tmp_path):
    async def cell():
        return tandem.train(model, train=ROWS, rewards=digits, steps=1, out=tmp_path / "run", config=SETTINGS)

    assert asyncio.run(cell()).steps == 1


def test_an_estimator_and_a_loss_of_ones_own(model, tmp_path, settings):
    heard, factor = [], 0.25

    def share(prompt, response, answer):
        return sum(c.isdigit() for c in response) * factor

    def scores(token_level_rewards, response_mask):
        advantages = token_level_rewards * response_mask
        return advantages, advantages

    def upward(log_probs, old_log_probs, advantages):
        return -log_probs * 1000.0, {}

    settings = {**settings, "actor_rollout_ref.actor.policy_loss.loss_mode": upward}
    run = tandem.train(
        model, train=ROWS, val=ROWS[:4], rewards=share, algorithm=scores, steps=2, out=tmp_path / "run",
        config=settings, on_step=lambda number, metrics: heard.append(number),
    )  # fmt: skip
    assert heard == [1, 2] == [row["step"] for row in run.metrics if "actor/pg_loss" in row]
    samples = run.samples(step=2)
    assert len(samples) == 20
    assert all(s["score"] == sum(c.isdigit() for c in s["response"]) / 4 for s in samples)
    assert run.metrics[-1]["advantages/max"] == max(sample["score"] for sample in samples)
    assert run.metrics[-1]["actor/pg_loss"] > 100
    ranks = settings.get("trainer.n_gpus_per_node", 0)
    assert len(list((tmp_path / "run" / "log").glob("global_pool_*.log"))) == ranks
    assert (run.export(tmp_path / "exported") / "config.json").is_file()


def test_mistakes_are_named_before_anything_is_loaded(model, tmp_path):
    def unknown(answer):
        return 0.0

    def own(prompt, response, answer):
        return 0.0

    for arguments, words in (
        ({"rewards": unknown}, "which responses the function needs"),
        ({"train": [{"question": "1"}] * 5}, "prompt"),
        ({"rewards": own, "train": [{"prompt": "1"}] * 5}, "answer"),
        ({"train": [{"prompt": "1", "answer": "1", "response": "x"}] * 5}, "column name response"),
        ({"rewards": 7}, "rewards"),
        ({"config": {"trainer.sede": 1}}, "trainer.seed"),
        ({"config": {"data.max_response_length": 512}}, "the model's positions"),
    ):
        given = {"train": ROWS, "rewards": digits, "steps": 1, "out": tmp_path / "run", "config": SETTINGS}
        with pytest.raises(TandemError, match=words):
            tandem.train(model, **given | arguments)


@pytest.mark.slow
def test_answers_and_measures_without_training(model, tmp_path):
    rows = tandem.generate(model, ["1+1=", "2+3="], n=2, config={"data.max_response_length": 4})
    assert [row["prompt"] for row in rows] == ["1+1=", "2+3="]
    assert all(len(row["responses"]) == 2 for row in rows)
    scored = [{**row, "answer": "2", "hint": "sum"} for row in rows]
    found = tandem.evaluate(None, scored, rewards=digits)
    own = [sum(c.isdigit() for c in text) / 4 for row in rows for text in row["responses"]]
    assert found["data"]["responses"] == 4
    assert found["data"]["measures"]["score"]["value"] == pytest.approx(sum(own) / 4)


def test_the_package_is_imported_without_pytorch():
    code = "import sys, tandem; dir(tandem); print('torch' in sys.modules)"
    assert cold("-c", code, timeout=60).stdout.strip() == "False"
    with pytest.raises(AttributeError, match="trian"):
        tandem.trian  # noqa: B018
