import pytest

import tandem
from tests.support.tiny import make_model

pytestmark = pytest.mark.slow

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
SETTINGS = {
    "actor_rollout_ref.actor.optim.lr": 0.01,
    "actor_rollout_ref.rollout.n": 4,
    "data.max_response_length": 4,
    "data.train_batch_size": 6,
    "trainer.n_gpus_per_node": 2,
    "trainer.logger": [],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def test_functions_written_in_place_run_on_two_processes(model, tmp_path, ray_cluster):
    heard, factor = [], 0.25

    def digits(prompt, response, answer):
        return sum(c.isdigit() for c in response) * factor

    def scores(token_level_rewards, response_mask):
        advantages = token_level_rewards * response_mask
        return advantages, advantages

    def upward(log_probs, old_log_probs, advantages):
        return -log_probs * 1000.0, {}

    run = tandem.train(
        model,
        train=ROWS,
        val=ROWS[:4],
        rewards=digits,
        algorithm=scores,
        steps=2,
        out=tmp_path / "run",
        config={**SETTINGS, "actor_rollout_ref.actor.policy_loss.loss_mode": upward},
        on_step=lambda number, metrics: heard.append(number),
    )
    assert heard == [1, 2] == [row["step"] for row in run.metrics if "actor/pg_loss" in row]
    samples = run.samples(step=2)
    assert len(samples) == 24
    assert all(s["score"] == sum(c.isdigit() for c in s["response"]) / 4 for s in samples)
    assert run.metrics[-1]["advantages/max"] == max(sample["score"] for sample in samples)
    assert len(list((tmp_path / "run" / "log").glob("global_pool_*.log"))) == 2
    assert (run.export(tmp_path / "exported") / "config.json").is_file()


def test_step_by_step_on_two_processes(model, tmp_path, ray_cluster):
    def digits(prompt, response, answer):
        return sum(c.isdigit() for c in response) / 4

    with tandem.Trainer(
        model, train=ROWS, val=ROWS[:4], rewards=digits, steps=2, out=tmp_path / "run", config=SETTINGS
    ) as trainer:
        numbers = [step.number for step in trainer]
        answers = trainer.generate(["1+2=", "3+4="])
        measured = trainer.evaluate()
    assert numbers == [1, 2]
    assert [len(texts) for texts in answers] == [1, 1]
    assert 0 <= measured["val/reward"] <= 1
