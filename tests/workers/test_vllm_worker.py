import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from tandem.engines.weight_sync import WeightSyncError
from tests.engines.rollout.vllm.models import build
from tests.support.ranks import run_ranks
from tests.workers import roles
from tests.workers.streamed import FAULTS, NAME

pytestmark = pytest.mark.vllm
vllm_engine = pytest.importorskip("tandem.engines.rollout.vllm.engine", exc_type=ImportError)


@pytest.fixture(scope="module")
def models(folder):
    model = build(vocab_size=len(AutoTokenizer.from_pretrained(folder / "model")))
    model.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def worker(models):
    precise = [f"actor_rollout_ref.{role}.fsdp_config.model_dtype=fp32" for role in ("actor", "ref")]
    config = roles.make_config(models, "actor_rollout_ref.rollout.name=hf", *precise)
    worker = roles.make_actor(config, "actor", "rollout")
    path, device = models / "model", torch.device("cpu")
    engine = vllm_engine.VLLMEngine(
        model_path=str(path), config=AutoConfig.from_pretrained(path), device=device, max_length=14
    )
    worker.parts["rollout"].engine = engine
    yield worker
    engine.close()


def test_what_was_sampled_is_what_is_trained_in_every_step(worker):
    for version in range(3):
        batch = roles.learn(worker, worker.generate_sequences(roles.make_prompts(3), 2, roles.PARAMS))
        assert roles.gap(batch) < 1e-4
        assert roles.versions(batch) == {version}


@pytest.mark.parametrize("fault", ["damaged", "swapped", "rows exchanged"])
def test_weights_that_do_not_arrive_stop_it_by_name(worker, fault, monkeypatch):
    load, (spoil, said) = vllm_engine.load_weights, FAULTS[fault]
    monkeypatch.setattr(vllm_engine, "load_weights", lambda model, stream: load(model, spoil(iter(stream))))
    with pytest.raises(WeightSyncError) as caught:
        worker.generate_sequences(roles.make_prompts(3), 2, roles.PARAMS)
    assert re.search(said, caught.value.got)


@pytest.fixture(scope="module")
def ranks(models):
    run_ranks(Path(__file__).with_name("vllm_split_job.py"), models, models)
    return [torch.load(models / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


def test_both_ranks_sample_the_whole_batch_and_one_gives_it(ranks):
    assert [rank["place"] for rank in ranks] == [(0, 1, True), (0, 1, False)]
    for one, other in zip(ranks[0]["steps"], ranks[1]["steps"], strict=True):
        assert one["tokens"] == other["tokens"] and one["log probs"] == other["log probs"]
    assert ranks[0]["counted"]["rollout/generated_tokens"] > 0
    assert "rollout/generated_tokens" not in ranks[1]["counted"]


def test_two_ranks_train_on_what_they_sampled(ranks):
    for rank in ranks:
        assert [step["versions"] for step in rank["steps"]] == [{0}, {1}]
        assert all(step["gap"] < 1e-4 for step in (*rank["steps"], rank["after"]))
        assert rank["steps"][0]["tokens"] != rank["steps"][1]["tokens"]


@pytest.mark.parametrize("fault", ["damaged", "swapped"])
def test_weights_that_reach_one_rank_wrongly_stop_both(ranks, fault):
    assert all(re.search(NAME, rank["faults"][fault]) for rank in ranks)


def test_streams_and_a_rollout_apart_write_the_same(ranks):
    assert all(rank["streamed"] and rank["apart"] for rank in ranks)
