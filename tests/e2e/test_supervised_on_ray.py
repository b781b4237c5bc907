"""Each step has nine rows, so the two ranks get uneven shares."""

from typing import Any

import pytest

from tandem.checkpoint import open_checkpoint
from tandem.errors import NonFiniteError, WorkerFailure
from tests.support.runs import without_times
from tests.support.school import FP64, Taught, school

__all__ = ["school"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]

TWO_RANKS = ("trainer.n_gpus_per_node=2",)
WORDS = {"sft": (), "rm": ("data.margin_key=margin", "center_rewards_coefficient=0.01")}


def numbers(run: Taught) -> list[dict[str, Any]]:
    rows = without_times(run.rows)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    return rows


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float = 1e-9) -> None:
    for got, expected in zip(found, wanted, strict=True):
        assert got == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("task", ["sft", pytest.param("rm", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp64", 1e-9), pytest.param("fp32", 1e-5, marks=pytest.mark.slow)]
)
def test_two_ranks_learn_what_one_learns(school, ray_cluster, task, precision, tolerance):
    words = (*WORDS[task], *([FP64] if precision == "fp64" else []))
    alone = school.run(task, f"{task}_{precision}_alone", *words)
    both = school.run(task, f"{task}_{precision}_both", *words, *TWO_RANKS)
    assert_same(numbers(both), numbers(alone), tolerance)
    assert both.trainer.model.world_size == 2
    assert both.rows[-1]["controller/value_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", pytest.param("rm", marks=pytest.mark.slow)])
def test_a_run_of_two_ranks_is_resumed_by_one(school, ray_cluster, task):
    whole = school.run(task, f"{task}_whole", FP64)
    name = f"{task}_moved"
    cut = ("trainer.save_freq=3", "optim.total_training_steps=6", FP64)
    school.run(task, name, *cut, *TWO_RANKS, "trainer.total_training_steps=3")
    moved = school.run(task, name, *cut)
    assert any("after step 3" in sentence for sentence in moved.said)
    assert open_checkpoint(moved.folder / "checkpoints" / "step_000006").step == 6
    assert_same(numbers(moved)[3:], numbers(whole)[3:])


@pytest.mark.slow
def test_a_rank_without_a_pair_takes_part(school, ray_cluster):
    words = ("data.train_batch_size=1", "trainer.total_training_steps=2", FP64)
    alone = school.run("rm", "one_pair_alone", *words)
    both = school.run("rm", "one_pair_both", *words, *TWO_RANKS)
    assert_same(without_times(both.rows), without_times(alone.rows))


def test_a_failing_rank_ends_the_run_with_a_report(school, ray_cluster):
    with pytest.raises((WorkerFailure, NonFiniteError), match="not finite"):
        school.run("sft", "diverges", *TWO_RANKS, "optim.lr=1e30")
