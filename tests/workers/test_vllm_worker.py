import re
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tandem.engines.weight_sync import WeightSyncError
from tests.engines.rollout.vllm.models import build
from tests.workers import roles
from tests.workers.streamed import FAULTS

pytestmark = pytest.mark.vllm
vllm_engine = pytest.importorskip("tandem.engines.rollout.vllm.engine", exc_type=ImportError)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = roles.make_folder(tmp_path_factory.mktemp("models"))
    model = build(vocab_size=len(AutoTokenizer.from_pretrained(folder / "model")))
    model.save_pretrained(folder / "model")
    plain = roles.make_config(
        folder,
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        "actor_rollout_ref.ref.fsdp_config.model_dtype=fp32",
    )
    worker = roles.make_actor(plain, "actor", "rollout")
    worker.parts["rollout"].engine = vllm_engine.VLLMEngine(
        model_path=str(folder / "model"), config=model.config, device=torch.device("cpu"), max_length=14
    )
    yield worker
    worker.parts["rollout"].engine.close()


def gap(batch: Any, recomputed: Any) -> float:
    columns = (batch.ragged("rollout_log_probs"), recomputed.ragged("old_log_probs"))
    sampled, trained = (column.values[batch.ragged("response_mask").values] for column in columns)
    return float((sampled - trained).abs().max())


def test_what_was_sampled_is_what_is_trained_in_every_step(worker):
    prompts = roles.make_prompts(3)
    for version in range(3):
        batch = worker.generate_sequences(prompts, 2, roles.PARAMS)
        old = worker.compute_log_prob(batch)
        assert gap(batch, old) < 1e-4
        assert set(batch.ragged("policy_version").values.tolist()) <= {0, version}
        batch = roles.with_targets(batch)
        worker.update_actor(batch.union(old, old.rename("old_log_probs", "ref_log_probs")))


@pytest.mark.parametrize("fault", ["damaged", "swapped", "rows exchanged"])
def test_weights_that_do_not_arrive_stop_it_by_name(worker, fault, monkeypatch):
    load, (spoil, said) = vllm_engine.load_weights, FAULTS[fault]
    monkeypatch.setattr(vllm_engine, "load_weights", lambda model, stream: load(model, spoil(iter(stream))))
    with pytest.raises(WeightSyncError) as caught:
        worker.generate_sequences(roles.make_prompts(3), 2, roles.PARAMS)
    assert re.search(said, caught.value.got)
