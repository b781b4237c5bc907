import json
import time
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cli.main import main
from tandem.cli.probing import Probing
from tandem.memory.levers import with_values
from tandem.protocol import DataProto
from tandem.trainer.probe import Seen, _quantiles, report, run_probe, teaching
from tests.support.words import rows as table
from tests.support.words import words as full_words

REWARDS = """
import time

def letters(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float("a" in solution_str), "acc": float("b" in solution_str)}

def slow(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.02)
    if solution_str[:1] < "h":
        raise ValueError("too early")
    return 1.0
"""


@pytest.fixture(scope="module")
def rewards(lab):
    return lab.reward(REWARDS)


def config_of(lab, *words):
    return lab.config("trainer.device=cpu", *words)


def probe(config, groups, limit_s=60):
    return run_probe(config, groups=groups, limit_s=limit_s, say=lambda sentence: None)


def test_it_sees_what_the_first_step_sees_and_leaves_no_trace(lab, rewards):
    words = (rewards, "custom_reward_function.name=letters data.train_batch_size=8")
    run = lab.run("first", *words, "A.optim.lr=0 steps=1")
    config = config_of(lab, *words, "A.use_kl_loss=true")
    seen = probe(config, groups=8)
    assert not (lab.folder / "never").exists()
    rows = run.samples(1)
    scores = np.array(rows["scores"]).reshape(8, 3)
    assert sorted(seen.rewards.tolist()) == sorted(scores.tolist())
    written = [sum(mask) for mask in rows["response_mask"]]
    assert sorted(seen.responses.ravel()) == sorted(written)
    asked = [len(mask) - sum(mask) for mask in rows["response_mask"][::3]]
    assert sorted(seen.prompts) == sorted(asked)
    assert seen.cut.mean() == run.rows[-1]["response_length/clip_ratio"]
    assert [count for count, *_ in seen.batches] == [8]
    found = report(seen, config)
    zero = run.rows[-1]["reward/zero_std_share"]
    assert 0 < zero < 1
    assert found["teach"]["value"] == pytest.approx(1 - zero) and found["teach"]["method"] == "wilson"
    assert found["teach"]["low"] < 1 - zero < found["teach"]["high"]
    right = np.array([json.loads(extra)["acc"] for extra in rows["reward_extra"]]).reshape(8, 3)
    assert found["all_right"]["value"] == right.all(1).mean()
    assert found["all_wrong"]["value"] == (right == 0).all(1).mean()
    assert found["reward"]["value"] == pytest.approx(scores.mean())
    assert found["response_length"]["value"] == pytest.approx(np.mean(written))
    assert found["longest"] == max(written) and found["median"]["value"] == np.median(written)
    assert found["generated_per_used"] is None


def test_rewards_that_fail_are_counted_and_their_seconds_measured(lab, rewards):
    config = config_of(lab, rewards, "custom_reward_function.name=slow algorithm.adv_estimator=rloo")
    seen = probe(config, groups=8)
    found = report(seen, config)
    assert 0 < found["reward_failures"]["failed"] < 1 and len(seen.calls) == 24
    assert found["reward_s_p95"] >= 0.02 and found["reward_s"] >= 0.02 / 8
    assert found["teach"]["value"] == 0, "a sample that failed is no other reward"


def test_a_limit_in_time_ends_it_after_a_batch(lab, rewards):
    config = config_of(lab, rewards, "custom_reward_function.name=letters")
    assert len(probe(config, groups=8, limit_s=0).prompts) == 4
    assert len(probe(config, groups=100).prompts) == 24, "all that there are"


def test_dynamic_sampling_is_judged_by_its_own_metric(lab, rewards):
    config = config_of(lab, rewards, "custom_reward_function.name=letters F.enable=true")
    seen = probe(config, groups=8)
    assert seen.kept.tolist() != seen.teaches.tolist(), "acc differs where the score does not"
    assert seen.kept.tolist() == [0 < row.mean() < 1 for row in seen.right]
    found = report(seen, config)["generated_per_used"]
    assert found["value"] == pytest.approx(1 / seen.kept.mean())
    assert found["low"] < found["value"] < found["high"]


COMPARED = {
    "grpo": lambda scores, parts: len(set(scores)) > 1,
    "gae": lambda scores, parts: len(set(scores)) > 1,
    "grpo_passk": lambda scores, parts: sorted(scores)[-1] > sorted(scores)[-2],
    "gdpo": lambda scores, parts: len(set(parts)) > 1,
}


@pytest.mark.parametrize("estimator", COMPARED)
def test_what_teaches_is_what_the_estimator_compares(lab, estimator):
    rng = np.random.default_rng(0)
    scores, parts = rng.integers(0, 3, (40, 3)), rng.integers(0, 2, (40, 3))
    config = with_values(config_of(lab), {"algorithm.adv_estimator": estimator})
    extras = [{"form": float(part)} for part in parts.ravel()]
    scored = DataProto({"scores": torch.from_numpy(scores.ravel()).float()}, {"reward_extra": extras})
    expected = [*map(COMPARED[estimator], scores.tolist(), parts.tolist())]
    assert 5 < sum(expected) < 40
    assert teaching(config, scored, 3).tolist() == expected


def test_few_samples_do_not_bound_the_tail():
    lengths = np.arange(1, 257).reshape(32, 8)
    few, many = _quantiles(lengths, 1000, 0), _quantiles(np.tile(lengths, (2, 1)), 1000, 0)
    assert few["p95"]["high"] < 257, "0.95^256 is small"
    assert few["p99"]["high"] == 1000, "0.99^256 = 0.076: all may lie below it"
    assert many["p99"]["high"] <= 256, "0.99^512 = 0.006"
    assert few["median"]["value"] == 128.5 and few["median"]["low"] < 128.5 < few["median"]["high"]


def seen_of(groups, gen_s):
    shape = (groups, 2)
    yes, no = np.ones(groups, dtype=bool), np.zeros(shape, dtype=bool)
    return Seen(
        *(np.full(groups, 4), np.full(shape, 5), no, no, np.zeros(shape), yes, yes),
        *([(groups, gen_s, 0.6)], [], dict.fromkeys(("failed", "timeouts", "died", "retried"), 0.0)),
    )


def plan(lab, *words):
    return main(["plan", *lab.overrides(lab.folder / "never"), *full_words("trainer.device=cpu", *words)])


def test_the_command_says_it_and_the_seconds(lab, rewards, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = (rewards, "custom_reward_function.name=letters")
    assert plan(lab, *words, "--probe", "6", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    probe, step = found["probe"], found["time"]["phases"]
    assert probe["asked"] == probe["groups"] == 6 and probe["n"] == 3
    assert step["reward"] == pytest.approx(12 * probe["reward_s"])
    assert step["step"] == pytest.approx(step["reward"] + step["generate_sequences"])
    assert plan(lab, *words, "--probe=6") == 0
    out = capsys.readouterr().out
    assert "6 of 6 prompts, 3 responses each" in out and "groups that teach" in out
    assert "measures the other phases" in out and "2 steps: " in out


def test_seconds_that_were_measured_stand_in_the_step(lab):
    """The probe measured generation twice as slow as in the time model, so a step is estimated so too."""
    config = config_of(lab)

    def step(lengths: Any) -> dict[str, float]:
        return {"generate_sequences": 0.1 * lengths.responses.size, "reward": 9.0, "update": 1.0, "step": 0.0}

    probing = Probing.__new__(Probing)
    probing._seen, probing._here = seen_of(3, 1.2), True
    probing.report = report(probing._seen, config)
    found = probing.seconds(config, step)
    assert found["generate_sequences"] == pytest.approx(2 * 0.1 * 8), "4 prompts of 2"
    assert found["reward"] == pytest.approx(0.1 * 8) and found["update"] == 1
    assert found["step"] == pytest.approx(0.8 + 0.8 - 9)
    probing._here = False
    assert probing.seconds(config, step)["generate_sequences"] == pytest.approx(0.8)


def test_an_estimator_with_a_critic_compares_no_groups(lab, rewards, capsys):
    words = (rewards, "custom_reward_function.name=letters GAE", "--probe=3")
    assert plan(lab, *words, "critic.ppo_mini_batch_size=4") == 0
    out = capsys.readouterr().out
    assert "groups whose rewards differ" in out and "distance from a baseline" in out
    assert plan(lab, *words, "critic.ppo_mini_batch_size=4 R.n=1") == 0
    assert "rewards differ" not in capsys.readouterr().out


MISSING = """
--probe=none | whole number above 0
--probe --probe-seconds=0 | whole number above 0
--probe --lengths 9 | exclude each other
--probe-seconds=9 | needs --probe
--probe data.train_files=absent.parquet | absent.parquet
--probe M.path=Qwen/Qwen2.5-7B | actor_rollout_ref.model.path
--probe custom_reward_function.path=absent.py | absent.py
--probe data.train_batch_size=28 | do not fill one batch
"""


@pytest.mark.parametrize(("words", "said"), table(MISSING))
def test_what_is_missing_is_said_before_a_model_is_loaded(lab, capsys, monkeypatch, words, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tandem.trainer.probe.build_ppo", lambda *_, **__: pytest.fail("it was built"))
    assert plan(lab, *words.split()) == 1
    assert said in capsys.readouterr().err


def test_calls_that_take_too_long_are_counted(lab):
    hangs = lab.reward("import time\n\ndef compute_score(*given, **named):\n    time.sleep(60)\n")
    config = config_of(lab, hangs, "reward.timeout=0.3 reward.num_workers=6")
    began = time.monotonic()
    seen = probe(config, groups=2, limit_s=0)
    assert time.monotonic() - began < 55, "no call was waited for to its end"
    assert seen.failures["timeouts"] == 6 and seen.failures["failed"] == 1
    assert seen.calls == [0.3] * 6
