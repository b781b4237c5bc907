from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engines.weight_sync import digest
from tandem.protocol import DataProto
from tests.support.ranks import run_ranks
from tests.workers import roles

ROOT = Path(__file__).parents[2]
PROMPTS = roles.make_prompts(3)
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8")
SMALL = "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return roles.make_folder(tmp_path_factory.mktemp("models"))


def config_of(folder: Path, run: Path, *words: str) -> Any:
    return roles.make_config(folder, f"trainer.default_local_dir={run}", *LORA, SMALL, *words)


def generate(worker: Any) -> DataProto:
    batch: DataProto = worker.generate_sequences(PROMPTS, 2, roles.PARAMS)
    return batch


def learn(worker: Any, batch: DataProto) -> DataProto:
    """Take one update, and return the batch with its log-probs before the update."""
    batch = roles.with_targets(batch)
    batch = batch.union(worker.compute_log_prob(batch)).union(worker.compute_ref_log_prob(batch))
    worker.update_actor(batch)
    return batch


def gap(worker: Any, batch: DataProto) -> float:
    """Return how far the rollout's log-probs are from those that the actor computes."""
    mask = batch.ragged("response_mask").values
    old = worker.compute_log_prob(batch).ragged("old_log_probs").values
    return float((old - batch.ragged("rollout_log_probs").values)[mask].abs().max())


def test_the_reference_is_the_base_without_a_second_engine(folder, tmp_path):
    config = config_of(folder, tmp_path)
    worker = roles.make_actor(config, *roles.ALL)
    assert set(worker.engines) == {"actor"}
    batch = learn(worker, generate(worker))
    for name in ("old_log_probs", "ref_log_probs"):  # no update was taken yet
        assert batch.ragged(name).values.abs().max() > 1
    assert torch.equal(batch.ragged("old_log_probs").values, batch.ragged("ref_log_probs").values)
    again = worker.compute_ref_log_prob(batch).ragged("ref_log_probs").values
    assert torch.equal(again, batch.ragged("ref_log_probs").values)
    apart = roles.make_actor(config, "ref")
    assert set(apart.engines) == {"ref"} and apart.engines["ref"].unshards
    assert torch.equal(apart.compute_ref_log_prob(batch).ragged("ref_log_probs").values, again)
    new = worker.compute_log_prob(batch).ragged("old_log_probs").values
    assert (new - again).abs().max() > 1e-3


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_rollouts_sample_from_the_merged_weights(folder, tmp_path, engine):
    worker = roles.make_actor(
        config_of(folder, tmp_path, f"actor_rollout_ref.rollout.name={engine}"), "actor", "rollout", "ref"
    )
    first = generate(worker)
    for _ in range(2):
        learn(worker, generate(worker))
    batch = generate(worker)
    assert gap(worker, batch) < 1e-9
    assert not batch.ragged("tokens").equal(first.ragged("tokens"))
    assert set(batch.ragged("policy_version").values[batch.ragged("response_mask").values].tolist()) == {2}


def test_a_rollout_elsewhere_takes_the_merged_weights(folder, tmp_path):
    config = config_of(folder, tmp_path)
    worker = roles.make_actor(config, *roles.ALL)
    other = roles.make_actor(config, "rollout")
    assert other.engines["rollout"].unshards
    learn(worker, generate(worker))
    for number in range(worker.weight_buckets()):
        other.load_weights(worker.export_weights(number))
    assert worker.weight_digest() == digest(worker.actor.weights()) == other.engines["rollout"].digest()
    assert generate(other).ragged("tokens").equal(generate(worker).ragged("tokens"))


def test_the_seed_of_the_run_draws_the_adapters(folder, tmp_path):
    def drawn(seed):
        worker = roles.make_actor(config_of(folder, tmp_path, f"trainer.seed={seed}"), "actor")
        named = dict(worker.actor.module.named_parameters())
        name = next(name for name in named if ".lora_A." in name)
        return named[name].full_tensor()

    torch.manual_seed(5)
    first = drawn(1)
    torch.manual_seed(6)
    assert torch.equal(first, drawn(1))
    assert not torch.equal(first, drawn(2))


def test_the_user_hears_how_much_is_trained(folder, tmp_path):
    config = config_of(folder, tmp_path)
    worker = roles.make_actor(config, "actor")
    info = worker.actor.state_info()
    said = (Path(config.trainer.default_local_dir) / "log" / "run.log").read_text()
    learns, total = info["trainable_parameters"], info["parameters"]
    assert 0 < learns < total / 3
    assert f"actor: {learns:,} of {total:,} parameters are trained." in said
    roles.make_critic(config)
    assert "critic" not in (Path(config.trainer.default_local_dir) / "log" / "run.log").read_text()


@pytest.mark.slow
def test_two_ranks_sample_what_one_does(folder, tmp_path):
    """Each rank's rollout receives merged weights as a stream, from shards or from parts of layers."""
    run_ranks(Path(__file__).with_name("lora_sync_job.py"), folder, tmp_path / "record.pt")
    record = torch.load(tmp_path / "record.pt", weights_only=False)
    worker = roles.make_actor(
        roles.make_config(folder, f"trainer.default_local_dir={tmp_path}", LORA[0]), *roles.ALL
    )
    prompts = roles.make_prompts(4)
    for step in range(3):
        batch = worker.generate_sequences(prompts, 2, roles.PARAMS)
        wanted = [part.ragged("tokens").values.tolist() for part in batch.chunk(2)]
        for name, found in record.items():
            assert found["engines"] == ["actor"]
            assert found["tokens"][step] == wanted, (name, step)
            assert found["gaps"][step] < 1e-9, (name, step)
        learn(worker, batch)
