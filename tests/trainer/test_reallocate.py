import functools

import pytest

from tandem.errors import ConfigError
from tandem.runtime import Placement, Role
from tandem.trainer.ppo import PPOTrainer
from tandem.workers.actor import ActorWorker
from tests.support.runs import assert_same

WORDS = ("GAE ADAPTIVE A.ppo_mini_batch_size=2 A.optim.lr_scheduler_type=cosine steps=4 trainer.test_freq=2",)


@pytest.fixture(scope="module")
def whole(lab):
    return lab.run("whole", *WORDS, lab.validated)


FUSED = Placement({"another": [1]}, {Role.ActorRolloutRef: "another"})
APART = Placement(
    {"a": [1], "b": [1], "c": [1]},
    {Role.Actor: "a", Role.Rollout: "b", Role.RefPolicy: "c", Role.Critic: "c", Role.Reward: "b"},
)


class Mover(PPOTrainer):
    def at_step_boundary(self, step: int) -> None:
        if step in (2, 3):
            self.reallocate(FUSED if step == 2 else APART)


def test_losses_are_those_of_a_run_that_stayed(lab, whole):
    moved = lab.run("moved", *WORDS, lab.validated, trainer=Mover)
    assert_same(moved, whole)
    roles = moved.trainer.roles
    assert len({id(group) for group in (roles.actor, roles.rollout, roles.reference, roles.critic)}) == 4
    assert roles.actor is not whole.trainer.roles.actor
    assert moved.checkpoints == ["step_000002", "step_000003"]


@pytest.mark.slow
def test_a_run_that_moved_can_be_resumed(lab, whole):
    class MovesOnce(PPOTrainer):
        def at_step_boundary(self, step: int) -> None:
            if step == 2:
                self.reallocate(APART)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lab.run("left", *WORDS, lab.validated, trainer=MovesOnce)
    assert_same(lab.run("left", *WORDS, lab.validated), whole)


def test_moving_to_what_is_not_there_says_so_and_keeps_the_checkpoint(lab):
    class Greedy(PPOTrainer):
        def at_step_boundary(self, step: int) -> None:
            self.reallocate(Placement({"wide": [2]}, {Role.ActorRollout: "wide"}))

    with pytest.raises(ConfigError, match="resource pool 'wide' of 2 processes"):
        lab.run("greedy", *WORDS, "trainer.test_freq=-1", trainer=Greedy)
    assert (lab.folder / "greedy" / "checkpoints" / "step_000001").is_dir()


@pytest.mark.slow
def test_a_rollout_of_its_own_gets_the_actors_weights_when_it_has_old_ones(lab, monkeypatch):
    """With two updates a step, weights go to the rollout after six updates and after eight, once each."""
    exported, original = [], ActorWorker.export_weights

    @functools.wraps(original)
    def counted(self, number):
        exported.append((self.actor.version, number))
        return original(self, number)

    monkeypatch.setattr(ActorWorker, "export_weights", counted)
    moved = lab.run("synced", *WORDS, lab.validated, trainer=Mover)
    assert exported == [(6, 0), (8, 0)]
    assert {token["policy_version"] for token in moved.tokens(4)} == {6}
