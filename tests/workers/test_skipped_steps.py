from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.errors import NonFiniteError
from tandem.protocol import DataProto, SamplingParams
from tests.workers import roles

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
ACTOR, CRITIC = "actor_rollout_ref.actor.optim", "critic.optim"
ADVANTAGES, RETURNS = "advantages", "returns"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return roles.make_folder(tmp_path_factory.mktemp("models"))


class Policy:
    """The update of the actor or the critic, with its messages and saved files."""

    def __init__(self, folder: Path, run: Path, role: str, *words: str) -> None:
        config = roles.make_config(folder, f"trainer.default_local_dir={run}", *words)
        actor = roles.make_actor(config, "actor", "rollout")
        batch = actor.generate_sequences(roles.make_prompts(4), 1, GREEDY)
        batch = roles.with_targets(batch)
        batch = batch.union(actor.compute_log_prob(batch))
        self.batch = batch.union(actor.compute_log_prob(batch).rename("old_log_probs", "ref_log_probs"))
        self.worker, self.engine, self.update = actor, actor.actor, actor.update_actor
        self.column = ADVANTAGES
        if role == "critic":
            critic = roles.make_critic(config)
            self.batch = self.batch.union(critic.compute_values(self.batch))
            self.worker, self.engine, self.update = critic, critic.engine, critic.update_critic
            self.column = RETURNS
        self.said: list[str] = []
        self.worker.tell = self._hear

    def _hear(self, sentence: str) -> None:
        if "recomputation" not in sentence:
            self.said.append(sentence)

    def step(self, *, bad: bool) -> dict[str, float]:
        values = self.batch.ragged(self.column).values
        spoilt = values * float("nan") if bad else values
        column = self.batch.ragged(self.column).with_values(spoilt)
        kept = {name: value for name, value in self.batch.batch.items() if name != self.column}
        return self.update(DataProto({**kept, self.column: column})).to_floats()

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights and the optimizer state."""
        found = {f"weight {name}": value.clone() for name, value in self.engine.weights()}
        for optimizer in self.engine._state.optimizers:
            for number, slots in enumerate(optimizer.state.values()):
                found |= {f"{number} {name}": value.clone() for name, value in slots.items()}
        return found


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    assert set(first) == set(second)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("role", "at"), [("actor", ACTOR), ("critic", CRITIC)])
def test_a_skipped_step_changes_nothing_and_is_reported(folder, tmp_path, role, at):
    policy = Policy(folder, tmp_path, role, f"{at}.skip_non_finite_steps=2", f"{at}.lr_warmup_steps=4")
    assert policy.step(bad=False)["skipped_steps"] == 0
    before = policy.state()
    assert policy.step(bad=True) == {"skipped_steps": 1}
    assert policy.step(bad=True) == {"skipped_steps": 2}
    assert policy.engine.version == 1 and same(policy.state(), before)
    paths = [tmp_path / "log" / f"{role}_update_1{again}_rank_0.pt" for again in ("", "_again_1")]
    assert len(policy.said) == 2
    for count, (path, sentence) in enumerate(zip(paths, policy.said, strict=True), 1):
        assert sentence.startswith(f"{role} update 1: ") and f"({count} in a row, 2 allowed)" in sentence
        assert f"DataProto.load('{path}')" in sentence
    assert all(DataProto.load(path).ragged(policy.column).values.isnan().any() for path in paths)
    after = policy.step(bad=False)
    assert (
        after["skipped_steps"] == 2 and after["lr"] == 0.01 / 4
    )  # the second step of the schedule, not the fourth
    assert policy.engine.version == 2 and not same(policy.state(), before)


def test_a_run_with_skipped_steps_goes_on_as_one_without(folder, tmp_path):
    policies = [
        Policy(folder, tmp_path / name, "actor", f"{ACTOR}.skip_non_finite_steps=1") for name in ("a", "b")
    ]
    for bad in (False, True, False, True, False):  # never two in a row
        policies[0].step(bad=bad)
        if not bad:
            policies[1].step(bad=False)
    assert same(policies[0].state(), policies[1].state())
    assert len(policies[0].said) == 2 and policies[1].said == []


def test_more_in_succession_than_allowed_end_the_run(folder, tmp_path):
    policy = Policy(folder, tmp_path, "actor", f"{ACTOR}.skip_non_finite_steps=1")
    policy.step(bad=True)
    before = policy.state()
    with pytest.raises(NonFiniteError, match="the loss is not finite") as caught:
        policy.step(bad=True)
    assert caught.value.field == "actor update 0"
    assert "actor_update_0_again_1_rank_0.pt" in str(caught.value.remedy)
    assert same(policy.state(), before)


def test_without_the_key_the_first_ends_the_run(folder, tmp_path):
    policy = Policy(folder, tmp_path, "actor")
    assert "skipped_steps" not in policy.step(bad=False)
    with pytest.raises(NonFiniteError, match="the loss is not finite"):
        policy.step(bad=True)
    assert policy.said == []
