import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.engines.rollout.vllm.models import build
from tests.support.ranks import run_ranks
from tests.workers import roles
from tests.workers.streamed import FAULTS

pytestmark = pytest.mark.vllm
pytest.importorskip("tandem.engines.rollout.vllm.engine", exc_type=ImportError)

JOB = Path(__file__).with_name("vllm_split_job.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = roles.make_folder(tmp_path_factory.mktemp("models"))
    model = build(vocab_size=len(AutoTokenizer.from_pretrained(folder / "model")))
    model.save_pretrained(folder / "model")
    run_ranks(JOB, folder, folder)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


def test_both_ranks_sample_the_whole_batch_and_one_gives_it(ranks):
    assert [rank["place"] for rank in ranks] == [(0, 1, True), (0, 1, False)]
    for one, other in zip(ranks[0]["steps"], ranks[1]["steps"], strict=True):
        assert one["tokens"] == other["tokens"] and one["log probs"] == other["log probs"]
    assert ranks[0]["counted"]["rollout/generated_tokens"] > 0
    assert "rollout/generated_tokens" not in ranks[1]["counted"]


def test_what_was_sampled_is_what_is_trained_in_every_step(ranks):
    for rank in ranks:
        assert [step["versions"] - {0} for step in rank["steps"]] == [set(), {1}]
        assert all(step["gap"] < 1e-4 for step in (*rank["steps"], rank["after"]))
        assert rank["steps"][0]["tokens"] != rank["steps"][1]["tokens"]


@pytest.mark.parametrize("fault", ["damaged", "swapped"])
def test_weights_that_reach_one_rank_wrongly_stop_both(ranks, fault):
    for rank in ranks:
        assert re.search(FAULTS[fault][1].split(" ")[0], rank["faults"][fault]), rank["faults"][fault]


def test_streams_and_a_rollout_apart_write_the_same(ranks):
    assert all(rank["streamed"] and rank["apart"] for rank in ranks)
