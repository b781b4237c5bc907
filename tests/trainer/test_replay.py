import hashlib
import json
import math

import numpy as np
import pytest

import tandem
from tandem.cli.main import main
from tandem.errors import ConfigError, DataError
from tandem.observability.reading import Run
from tandem.observability.run import read_batch
from tandem.trainer.replay import replay
from tandem.trainer.replay_report import replay_found, text
from tandem.trainer.takes import Changes, kept_rows
from tests.support.words import words as full_words

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(set(solution_str)) / 6, "length": len(solution_str)}

def length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) + int(ground_truth) / 100

def named(prompt, response, reward_model, data_source, extra_info=None, absent=0):
    assert isinstance(prompt, (str, list)) and prompt and data_source and absent == 0
    return len(response) + int(reward_model["ground_truth"]) / 100

def batched(prompts, responses, **columns):
    truths = [row["ground_truth"] for row in columns["reward_model"]]
    return [len(text) + int(truth) / 100 for text, truth in zip(responses, truths)]

def other(prompt, response, difficulty):
    return difficulty
"""
WORDS = (
    "custom_reward_function.name=score A.entropy_coeff=0.01 A.ppo_mini_batch_size=2",
    "A.optim.lr_scheduler_type=cosine steps=5 trainer.save_freq=2",
)
PPO = "GAE ADAPTIVE A.shuffle=true A.ppo_epochs=2"


def make(lab, name, *words):
    (lab.folder / "score.py").write_text(REWARD)
    return lab.run(name, f"custom_reward_function.path={lab.folder / 'score.py'}", *WORDS, *words)


@pytest.fixture(scope="module")
def grpo(lab):
    """Run two steps, then resume with another learning rate schedule."""
    make(lab, "grpo", "steps=2")
    return make(lab, "grpo")


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_step_is_what_it_was_and_the_folder_stays_as_it_is(lab, grpo):
    """The replay takes the second of two steps after a checkpoint. The data and the reward file are gone."""
    before = contents(grpo.folder)
    kept = {name: name.read_bytes() for name in (lab.train, lab.folder / "score.py")}
    for name in kept:
        name.unlink()
    try:
        found = replay(Run(grpo.folder), 4)
    finally:
        for name, content in kept.items():
            name.write_bytes(content)
    assert (found.checkpoint, found.equal) == (2, True)
    for step in (1, 2):  # of the first start, whose schedule ended with the second
        first = replay(Run(grpo.folder), step)
        assert (first.checkpoint, first.equal) == (0, True), step
    learnt = ("reward/mean", "actor/loss", "actor/grad_norm", "actor/lr", "advantages/max", "rollout/kl")
    assert set(learnt) <= set(found.recorded)
    assert found.recorded["actor/grad_norm"] == grpo.rows[4 - 1]["actor/grad_norm"]
    assert found.recorded == {name: found.replayed.metrics[name] for name in found.recorded}
    assert contents(grpo.folder) == before


@pytest.mark.slow
def test_a_critic_and_a_controller_go_on_from_the_first_model(lab):
    run = make(lab, "ppo", PPO)
    found = replay(Run(run.folder), 2)
    assert (found.checkpoint, found.equal) == (0, True)
    assert {"critic/loss", "critic/grad_norm", "actor/kl_in_reward", "actor/kl_coef"} <= set(found.recorded)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ["grpo", "ppo", "two ray ranks"])
def test_twenty_random_steps(lab, request, name):
    words = {"ppo": PPO, "two ray ranks": "trainer.n_gpus_per_node=2"}.get(name, "")
    if "two" in name:
        request.getfixturevalue("ray_cluster")
    run = make(lab, f"long {name}", words, "steps=24 trainer.save_freq=3")
    chosen = np.random.default_rng(0).permutation(np.arange(1, 25))[:20]
    assert [step for step in chosen.tolist() if not replay(Run(run.folder), step).equal] == []


@pytest.mark.slow
def test_two_ranks_on_ray(lab, ray_cluster):
    run = make(lab, "two", "trainer.n_gpus_per_node=2 steps=2 trainer.save_freq=1")
    found = replay(Run(run.folder), 2, Changes(["actor_rollout_ref.actor.entropy_coeff=0.5"]))
    assert (found.checkpoint, found.equal) == (1, True)
    for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
        assert found.base.metrics[name] == pytest.approx(found.recorded[name], rel=1e-5, abs=1e-7)
    more = 0.49 * found.base.metrics["actor/entropy"]  # exact only for the first of two updates
    assert found.changed.metrics["actor/loss"] == pytest.approx(found.recorded["actor/loss"] - more, rel=0.2)


def test_another_reward_is_what_a_plain_recomputation_gives(lab, grpo):
    told = replay_found(Run(grpo.folder), 3, (), f"{lab.folder / 'score.py'}:length")
    samples = read_batch(grpo.folder / "samples" / "step_000003.parquet")
    arrays = samples.non_tensor_batch
    truths = [int(truth) for truth in arrays["ground_truth"]]
    scores = np.array([len(t) + n / 100 for t, n in zip(arrays["response_text"], truths, strict=True)])
    metrics = {row["name"]: row for row in told["changed"]["metrics"]}
    assert metrics["reward/mean"]["after"] == pytest.approx(scores.mean(), rel=1e-6)
    assert metrics["reward/mean"]["before"] == grpo.rows[2]["reward/mean"]
    rows = {(row["uid"], row["sample"]): row for row in told["changed"]["samples"]}
    for uid in set(arrays["uid"]):
        own = arrays["uid"] == uid
        expected = (scores[own] - scores[own].mean()) / (scores[own].std(ddof=1) + 1e-6)
        found = [rows[uid, number]["advantage_after"] for number in arrays["sample"][own]]
        assert found == pytest.approx(expected, abs=1e-5)
    assert -1 <= told["changed"]["gradient"]["cosine"] < 0.999


@pytest.mark.slow
def test_another_reward_may_read_what_a_run_keeps_by_name(lab, grpo):
    path, means = lab.folder / "score.py", []
    for name in ("length", "named", "batched"):
        changed = replay(Run(grpo.folder), 3, Changes(reward=f"{path}:{name}")).changed
        means.append(changed.metrics["reward/mean"])
    assert means[0] == means[1] == means[2] != grpo.rows[2]["reward/mean"]
    with pytest.raises(DataError) as caught:
        replay(Run(grpo.folder), 3, Changes(reward=f"{path}:other"))
    assert str(caught.value.got).endswith("reads difficulty")


@pytest.mark.slow
def test_attribution_adds_up_to_the_steps_gradient(grpo):
    told = tandem.open(grpo.folder).replay(3, attribute=True)
    updates = told["attribution"]["updates"]
    assert len(updates) == 2  # of two prompts each
    assert [update["sum"] for update in updates] == pytest.approx([1.0, 1.0], abs=1e-5)
    norm = sum(update["norm"] for update in updates) / 2
    assert norm == pytest.approx(grpo.rows[2]["actor/grad_norm"], rel=1e-5)
    samples = told["attribution"]["samples"]
    assert len(samples) == 12
    assert sum(row["share"] for row in samples) == pytest.approx(1.0, abs=1e-5)
    lengths = {(r["uid"], r["sample"]): r["prompt_tokens"] for r in Run(grpo.folder).samples(3)}
    for row in samples:
        prompt = lengths[row["uid"], row["sample"]]
        assert row["share"] == pytest.approx(sum(row["tokens"]))
        assert not any(row["tokens"][:prompt]) and len(row["tokens"]) == len(row["ids"])
    assert told["attribution"]["steps"] > 0


def test_a_sample_that_is_left_out_is_in_no_update(grpo):
    run = Run(grpo.folder)
    uid = run.samples(3)[0]["uid"]
    config = {"algorithm.adv_estimator": "rloo"}
    told = tandem.open(grpo.folder).replay(3, without=[f"{uid}#0"], config=config)
    rows = {(row["uid"], row["sample"]): row for row in told["changed"]["samples"]}
    assert rows[uid, 0]["advantage_after"] is None
    others = [row["score"] for row in run.samples(3) if row["uid"] == uid][1:]
    assert rows[uid, 1]["advantage_after"] == pytest.approx(others[0] - others[1], abs=1e-6)
    batch = read_batch(grpo.folder / "samples" / "step_000003.parquet")
    assert len(kept_rows(batch, [uid])) == 9


def test_the_command(grpo, capsys):
    changes = ("--attribute", "algorithm.adv_estimator=rloo")
    assert main(["replay", str(grpo.folder), "--step", "5", *changes]) == 0
    out = capsys.readouterr().out
    assert "step 5, from the checkpoint of step 4: " in out and "metrics equal, bit for bit" in out
    assert "gradient: cosine " in out and "unclipped gradient" in out
    assert main(["replay", str(grpo.folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["equal"], list(told)) == (5, True, ["step", "checkpoint", "equal", "metrics"])


@pytest.mark.parametrize(("before", "after"), [(2.0, 0.0), (0.0, 0.0), (0.0, 3.0)])
def test_a_gradient_without_a_direction_has_no_cosine(before, after):
    said = "no longer zero" if after else "zero, so nothing is"
    gradient = {"cosine": math.nan, "before": before, "after": after}
    changed = {"metrics": [], "gradient": gradient, "samples": []}
    shown = text({"metrics": [], "step": 1, "checkpoint": 0, "changed": changed}, str)
    assert f"gradient: {said}" in shown and f"norm {before:g} → {after:g}" in shown and "nan" not in shown


def test_a_file_that_is_not_the_one_it_was_is_noticed(lab, grpo, capsys):
    lines = (grpo.folder / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    rows[-1]["actor/loss"] += 1e-12
    (grpo.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        assert main(["replay", str(grpo.folder)]) == 1
    finally:
        (grpo.folder / "metrics.jsonl").write_text(lines)
    said = capsys.readouterr()
    assert "1 metrics differ" in said.err
    assert next(line for line in said.out.splitlines() if line.startswith("actor/loss")).endswith("no")


def test_what_a_folder_lacks_is_said_with_the_key_that_keeps_it(lab, grpo):
    sparse = make(lab, "sparse", "trainer.samples_freq=2 steps=3 trainer.save_freq=0")
    with pytest.raises(DataError, match="did not keep") as caught:
        replay(Run(sparse.folder), 2)
    assert caught.value.got == "no samples of step 1"
    assert "trainer.samples_freq=1" in str(caught.value.remedy)
    with pytest.raises(DataError, match="no such step"):
        replay(Run(grpo.folder), 9)
    for field in ("data.train_batch_size", "trainer.seed"):
        with pytest.raises(ConfigError, match="given samples") as refused:
            replay(Run(grpo.folder), 2, Changes([f"{field}=2"]))
        assert refused.value.field == field
    exact = full_words("A.use_kl_loss=true A.kl_loss_type=full")
    for changes, said in ((Changes(reward="score.py"), "names no function"), (Changes(exact), "exact KL"),
                          (Changes(without=["nobody"]), "no such sample")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            replay(Run(grpo.folder), 2, changes)
