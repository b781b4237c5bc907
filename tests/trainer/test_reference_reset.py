import pytest
import torch

from tandem.engines.train.fsdp import FSDPEngine
from tandem.engines.weight_sync import WeightSyncError
from tandem.errors import CheckpointError, ConfigErrors
from tandem.runtime import Placement, Role
from tandem.trainer.ppo import PPOTrainer
from tests.support.runs import assert_same, broken_off

WORDS = (
    "ADAPTIVE A.use_kl_loss=true A.kl_loss_type=full A.kl_loss_coef=0.1 REF.reset_interval=2",
    "steps=6 trainer.save_freq=3",
)


def run(lab, name, *words, **options):
    return lab.run(name, *WORDS, lab.letters, *words, **options)


@pytest.fixture(scope="module")
def whole(lab):
    return run(lab, "whole")


def reference_weights(finished):
    return dict(finished.trainer.roles.reference._workers._worker.engines["ref"].weights())  # type: ignore


def test_every_second_step_the_reference_becomes_the_actor(whole):
    assert [row["actor/reference_step"] for row in whole.rows] == [0, 0, 2, 2, 4, 4]
    for name in ("actor/kl", "actor/kl_in_reward"):
        assert [row[name] == 0.0 for row in whole.rows] == [True, False] * 3  # 0: identical policies
    actor, reference = whole.weights(), reference_weights(whole)
    assert all(torch.equal(actor[name], reference[name]) for name in actor)
    assert whole.trainer.roles.reference.reference_version() == 6  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("step", "words"), [pytest.param(4, (), marks=pytest.mark.slow), (6, ("trainer.async_save=true",))]
)
def test_a_resumed_run_is_the_whole_one_bit_by_bit(lab, whole, step, words):
    with broken_off(step):
        run(lab, f"stopped {step}", *words)
    assert (lab.folder / f"stopped {step}" / "checkpoints" / "step_000003" / "ref").is_dir()
    resumed = run(lab, f"stopped {step}", *words)
    assert_same(resumed, whole)
    for name, value in reference_weights(whole).items():
        assert torch.equal(value, reference_weights(resumed)[name])


@pytest.mark.slow
def test_with_the_reference_the_optimizer_begins_anew(lab, whole):
    """A first step of Adam moves each weight by the learning rate, whatever its gradient is."""
    longest = {}
    for name, words in (("kept", ()), ("anew", ("REF.reset_optimizer=true",))):
        before, after = (
            run(lab, f"{name} {steps}", *words, f"steps={steps} trainer.save_freq=-1") for steps in (2, 3)
        )
        first, second = before.weights(), after.weights()
        moved = torch.cat([(second[key] - first[key]).flatten().abs() for key in first])
        longest[name] = moved.max().item(), moved[moved > 0].median().item()
    assert longest["anew"] == pytest.approx((0.01, 0.01), rel=0.02)
    assert longest["kept"][1] < 0.009
    assert whole.rows[1]["actor/loss"] == after.rows[1]["actor/loss"]


class Mover(PPOTrainer):
    def at_step_boundary(self, step: int) -> None:
        if step == 3:
            roles = {Role.Actor: "a", Role.Rollout: "b", Role.RefPolicy: "c", Role.Reward: "b"}
            self.reallocate(Placement({name: [1] for name in "abc"}, roles))


def test_a_reference_apart_goes_on_with_the_same_numbers(lab, whole):
    moved = run(lab, "moved", trainer=Mover)
    assert moved.trainer.roles.reference is not moved.trainer.roles.actor
    assert_same(moved, whole)


def test_weights_that_do_not_arrive_end_the_run(lab, monkeypatch):
    original = FSDPEngine.load_weights

    def forgets(self, stream, *given, **more):
        original(self, [item for item in stream if "norm" not in item[0]], *given, **more)

    monkeypatch.setattr(FSDPEngine, "load_weights", forgets)
    with pytest.raises(WeightSyncError, match="in the reference policy differ"):
        run(lab, "forgets")


def test_a_run_does_not_go_back_to_the_first_reference_without_a_word(lab):
    run(lab, "kept", "steps=2 trainer.save_freq=2")
    with pytest.raises(CheckpointError, match="no longer the model") as caught:
        run(lab, "kept", "REF.reset_interval=0 trainer.resume_with_changes=true")
    assert caught.value.field == "actor_rollout_ref.ref.reset_interval"


def test_the_base_of_adapters_cannot_be_reset(lab):
    with pytest.raises(ConfigErrors, match="has no weights of its own to reset"):
        run(lab, "adapters", "M.lora_rank=4")
