from pathlib import Path

import pytest
import torch

from tandem.engines.weight_sync import digest
from tests.workers import roles

PROMPTS = roles.make_prompts(3)
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8")
SMALL = "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1"


@pytest.fixture
def configured(folder, tmp_path):
    return lambda *words: roles.make_config(folder, *LORA, SMALL, *words, run=tmp_path)


def generate(worker):
    return worker.generate_sequences(PROMPTS, 2, roles.PARAMS)


def test_the_reference_is_the_base_without_a_second_engine(configured):
    worker = roles.make_actor(configured(), *roles.ALL)
    assert set(worker.engines) == {"actor"}
    batch = roles.learn(worker, generate(worker), reference=True)
    old, ref = (batch.ragged(f"{name}_log_probs").values for name in ("old", "ref"))
    assert torch.equal(old, ref) and ref.abs().max() > 1  # no update was taken yet
    assert torch.equal(worker.compute_ref_log_prob(batch).ragged("ref_log_probs").values, ref)
    apart = roles.make_actor(configured(), "ref")
    assert set(apart.engines) == {"ref"} and apart.engines["ref"].unshards
    assert torch.equal(apart.compute_ref_log_prob(batch).ragged("ref_log_probs").values, ref)
    assert (worker.compute_log_prob(batch).ragged("old_log_probs").values - ref).abs().max() > 1e-3


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_rollouts_sample_from_the_merged_weights(configured, engine):
    worker = roles.make_actor(configured(f"actor_rollout_ref.rollout.name={engine}"), *roles.ALL)
    first = generate(worker)
    for _ in range(2):
        roles.learn(worker, generate(worker), reference=True)
    batch = generate(worker)
    assert roles.gap(batch.union(worker.compute_log_prob(batch))) < 1e-9
    assert not batch.ragged("tokens").equal(first.ragged("tokens"))
    assert roles.versions(batch) == {2}


def test_a_rollout_elsewhere_takes_the_merged_weights(configured):
    worker, other = roles.make_actor(configured(), *roles.ALL), roles.make_actor(configured(), "rollout")
    assert other.engines["rollout"].unshards
    roles.learn(worker, generate(worker), reference=True)
    roles.transfer(worker, other)
    assert worker.weight_digest() == digest(worker.actor.weights()) == other.engines["rollout"].digest()
    assert generate(other).ragged("tokens").equal(generate(worker).ragged("tokens"))


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_seed_of_the_run_draws_the_adapters(configured, role):
    def drawn(seed, other):
        torch.manual_seed(other)
        config = configured("critic.model.lora_rank=2", f"trainer.seed={seed}")
        worker = roles.make_actor(config, "actor") if role == "actor" else roles.make_critic(config)
        named = worker.engines[role].module.named_parameters()
        return {name: value.detach().full_tensor() for name, value in named if "lora_A" in name}

    first, again, other = drawn(1, 5), drawn(1, 6), drawn(2, 5)
    assert first and all(torch.equal(value, again[name]) for name, value in first.items())
    assert not any(torch.equal(value, other[name]) for name, value in first.items())


def test_the_user_hears_how_much_is_trained(configured):
    config = configured()
    info = roles.make_actor(config, "actor").actor.state_info()
    roles.make_critic(config)
    said = (Path(config.trainer.default_local_dir) / "log" / "run.log").read_text()
    learns, total = info["trainable_parameters"], info["parameters"]
    assert 0 < learns < total / 3 and f"actor: {learns:,} of {total:,}" in said
    assert "critic" not in said


@pytest.mark.slow
def test_two_ranks_sample_what_one_does(folder, tmp_path):
    record = roles.on_ranks("lora", folder, 2)
    worker = roles.make_actor(roles.make_config(folder, LORA[0], run=tmp_path), *roles.ALL)
    prompts = roles.make_prompts(4)
    for step in range(3):
        batch = worker.generate_sequences(prompts, 2, roles.PARAMS)
        wanted = [part.ragged("tokens").values.tolist() for part in batch.chunk(2)]
        for name, found in record.items():
            assert found["engines"] == ["actor"]
            assert found["tokens"][step] == wanted, (name, step)
            assert found["gaps"][step] < 1e-9, (name, step)
        roles.learn(worker, batch, reference=True)
