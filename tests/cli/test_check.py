"""`tandem check --run`: a correct run, and runs with faulty rollouts."""

import pytest

from tandem.config.load import load_train_config
from tandem.trainer.control import Probe, controlled

OWN = """
import torch
from tandem.workers.actor import ActorWorker
from tandem.workers.rollout_part import RolloutPart

class ChangesTokens(RolloutPart):
    def batch(self, *args):
        batch = super().batch(*args)
        tokens = batch.ragged("tokens")
        values = tokens.values.clone()
        values[tokens.offsets[1:] - 1] = 3
        batch.batch["tokens"] = tokens.with_values(values)
        return batch

class Changes(ActorWorker):
    rollout_part = ChangesTokens

class Rounds(ActorWorker):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        with torch.no_grad():
            for parameter in self.engines["rollout"].module.parameters():
                parameter.copy_(parameter.bfloat16())

    def load_weights(self, bucket):
        self.engines["rollout"].version = bucket.version  # at learning rate 0 they are the same

class WithoutLogProbs(RolloutPart):
    def batch(self, *args):
        batch = super().batch(*args)
        return batch.select([name for name in batch.batch if "log_probs" not in name])

class Silent(ActorWorker):
    rollout_part = WithoutLogProbs

class Keeps(ActorWorker):
    def load_weights(self, bucket):
        if "model.norm.weight" in bucket.tensors:
            bucket.tensors["model.norm.weight"] = bucket.tensors["model.norm.weight"] * 2
        super().load_weights(bucket)
"""
HF = "actor_rollout_ref.rollout.name=hf"


@pytest.fixture
def checked(lab, typed):
    """Return a function that runs the check with a class of `OWN`."""
    (lab.folder / "own_rollouts.py").write_text(OWN)

    def run(name: str) -> tuple[int, str, str]:
        classes = f"trainer.worker_classes={{rollout: '{lab.folder / 'own_rollouts.py'}:{name}'}}"
        return typed("check", "--run", *lab.overrides(lab.folder / "never"), HF, classes)

    return run


def test_a_sound_run_is_at_its_floor_and_leaves_no_trace(lab, printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = lab.folder / "never"
    words = lab.overrides(run, actor_rollout_ref__actor__ppo_mini_batch_size=2)
    out = printed("check", "--run", *words, HF)
    rows = {line[:28].strip(): line[28:].split() for line in out.splitlines()}
    first, second, floor = map(float, rows["rollout/log_prob_diff_mean"])
    assert 0 < first == second < floor == 1e-4
    for name in ("weights changed", "rollout/version_lag", "rollout/changed_samples", "actor/clip_fraction"):
        assert rows[name] == ["0", "0", "0"], name
    assert out.endswith("rollout and training agree\n") and "above" not in out
    assert not run.exists() and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "cause", "probe"),
    [
        ("Changes", "tokens were changed between the engine and training", "rollout/changed_samples"),
        ("Rounds", "numerical differences between the engines", "rollout/log_prob_diff_mean"),
    ],
)
def test_the_cause_is_named(checked, name, cause, probe):
    status, out, _ = checked(name)
    assert status == 1 and cause in out.split("wrong: ")[1]
    (line,) = [line for line in out.splitlines() if line.startswith(probe)]
    assert line.endswith("above")


def test_a_rollout_without_log_probs_is_not_measured_and_that_is_said(checked):
    status, out, _ = checked("Silent")
    assert status == 0 and "no log-probs" in out and "not measured" in out
    assert "weights changed" in out and "rollout/log_prob_diff_mean" not in out


def test_weights_that_do_not_arrive_are_named(checked):
    status, _, err = checked("Keeps")
    assert status == 1 and "model.norm.weight" in err


def test_run_and_sft_do_not_go_together(refused):
    assert "--run is for configs of `tandem train`" in refused("check", "--run", "--sft")


def test_the_control_keeps_the_shape_of_the_run(lab, tmp_path):
    def sizes(batch: int, mini: int) -> tuple[int, int]:
        words = lab.overrides(
            tmp_path, data__train_batch_size=batch, actor_rollout_ref__actor__ppo_mini_batch_size=mini
        )
        config = controlled(load_train_config(None, words).config, tmp_path / "control")
        assert config.actor_rollout_ref.actor.optim.lr == config.critic.optim.lr == 0
        assert (config.trainer.save_freq, config.trainer.total_training_steps) == (-1, 2)
        assert config.trainer.default_local_dir == str(tmp_path / "control")
        return config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size

    assert [sizes(64, 64), sizes(64, 16), sizes(4, 4), sizes(3, 1), sizes(1, 1)] == [
        (8, 8), (8, 4), (4, 4), (3, 2), (1, 1),
    ]  # fmt: skip


def test_a_probe_is_at_its_floor_if_both_values_and_their_difference_are():
    assert Probe("x", 1.0, 1.0, 1.0).at_floor
    assert not Probe("x", 1.0, -0.1, 1.0).at_floor
    assert not Probe("x", 0.0, float("nan"), 1.0).at_floor
