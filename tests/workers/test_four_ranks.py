from pathlib import Path

import pytest
import torch

from tandem.observability.timers import read_timeline
from tandem.protocol import DataProto, Ragged
from tests.support.ranks import run_ranks
from tests.workers import roles

ROOT = Path(__file__).parents[2]
COLUMNS = {
    "tokens": torch.int64,
    "response_mask": torch.bool,
    "policy_version": torch.int32,
    "rollout_log_probs": torch.float64,
    "old_log_probs": torch.float64,
    "ref_log_probs": torch.float64,
    "values": torch.float64,
    "token_level_scores": torch.float32,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return roles.make_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one(folder):
    config = roles.make_config(folder, f"trainer.default_local_dir={folder / 'one'}")
    return roles.program(roles.Team(config, 0, 1))


@pytest.fixture(scope="module")
def four(folder):
    results = folder / "record.pt"
    run_ranks(Path(__file__).with_name("four_rank_job.py"), folder, results, ranks=4)
    return torch.load(results, weights_only=False)


@pytest.mark.parametrize(("step", "samples"), [("first", 14), ("second", 6)])
def test_every_column_is_that_of_one_rank(one, four, step, samples):
    found, wanted = four[step]["batch"], one[step]["batch"]
    assert len(found) == len(wanted) == samples
    for name, dtype in COLUMNS.items():
        column, expected = found.ragged(name), wanted.ragged(name)
        assert column.dtype == expected.dtype == dtype, name
        assert torch.equal(column.offsets, expected.offsets), name
        assert torch.allclose(column.values.double(), expected.values.double(), rtol=0, atol=1e-9), name
    assert found.dense("scores").std() > 0.01
    for name in ("uid", "index", "sample", "finish_reason", "response_text", "reward_extra"):
        assert list(found.non_tensor_batch[name]) == list(wanted.non_tensor_batch[name]), name


def test_the_version_that_wrote_the_tokens_is_the_actors(four):
    for number, step in enumerate(("first", "second")):
        batch = four[step]["batch"]
        written = batch.ragged("policy_version").values[batch.ragged("response_mask").values]
        assert set(written.tolist()) == {number}


def test_losses_and_weights_are_those_of_one_rank(one, four):
    for step in ("first", "second"):
        for role in ("actor", "critic"):
            found, wanted = four[step]["metrics"][role], one[step]["metrics"][role]
            assert set(found) == set(wanted) and "loss" in found and "grad_norm" in found
            for name, value in wanted.items():
                # compare absolute differences of numbers near zero, such as kl and clipping in a first update
                assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-9), (step, role, name)
    assert set(four["weights"]) == set(one["weights"])
    for name, value in one["weights"].items():
        assert torch.allclose(four["weights"][name], value, rtol=0, atol=1e-9), name


def test_a_stream_gives_the_rows_of_generate_sequences(four):
    """Two prompts with two samples each give at most four parts, and a rank without prompts gives none."""
    for name, shares in (("streamed", [4, 4, 4, 2]), ("streamed few", [2, 2, 2, 0])):
        assert [sum(sizes) for sizes, _ in four[name]] == shares
        assert all(same for _, same in four[name])
        assert four[name][-1][0] == [] or shares[-1]


def test_a_rollout_of_its_own_takes_the_actors_weights(one, four):
    assert four["moved"] is True and one["moved"] is True


def test_each_rank_keeps_its_share_of_a_bad_batch(four):
    shares = four["first"]["batch"].chunk(4)
    for rank, (field, name, saved) in enumerate(four["non_finite"]):
        assert field == "actor update 2"
        assert name == f"actor_update_2_rank_{rank}.pt"
        assert saved.ragged("tokens").equal(shares[rank].ragged("tokens"))
        assert bool(saved.ragged("advantages").values.isnan().any()) == (rank == 3)
    assert all(torch.equal(four["after"][name], value) for name, value in four["weights"].items())


def test_collectives_are_reported_by_role(one, four):
    for role in ("actor", "ref", "critic", "reward_model"):
        assert four["first"]["observed"][f"perf/collective_bytes/{role}"] > 0
        assert 0 < four["first"]["observed"][f"perf/collective_s/{role}"] < 200
        assert one["first"]["observed"][f"perf/collective_bytes/{role}"] == 0


def test_what_is_observed_of_several_ranks(one, four):
    """Metrics of ranks are combined in three ways.

    Seconds and bytes are averaged, token counts are summed, and other counters are the maximum.
    """
    found, ranks = four["first"]["observed"], four["first"]["observed by rank"]
    for role in ("actor", "ref", "critic", "reward_model"):
        for name in (f"perf/collective_s/{role}", f"perf/collective_bytes/{role}"):
            assert found[name] == pytest.approx(sum(rank[name] for rank in ranks) / 4)
    assert [rank["rollout/peak_running"] for rank in ranks] == [4, 4, 4, 2]
    for name in ("rollout/peak_running", "rollout/decode_steps", "rollout/cache_bytes"):
        assert found[name] == max(rank[name] for rank in ranks) > 0
    for name in ("rollout/generated_tokens", "rollout/prefill_tokens", "rollout/decode_steps"):
        assert found[name] == one["first"]["observed"][name], name


def test_the_timeline_has_every_role_of_every_rank(four, folder):
    events = read_timeline(folder / "run" / "timeline.json")
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"}
    roles_of_ranks = [f"{r} rank {rank}" for r in ("actor", "critic", "reward_model") for rank in range(4)]
    assert set(roles_of_ranks) <= set(names.values())
    phases = {(names[event["pid"], event["tid"]], event["name"]) for event in events if event["ph"] == "B"}
    assert {
        ("actor rank 3", "gen"),
        ("actor rank 3", "old_log_prob"),
        ("actor rank 3", "ref"),
        ("critic rank 3", "values"),
        ("reward_model rank 3", "reward"),
    } <= phases


def test_a_batch_of_no_samples_has_all_columns(folder):
    config = roles.make_config(folder, f"trainer.default_local_dir={folder / 'none'}")
    actor = roles.make_actor(config, "actor", "rollout")
    prompts = roles.make_prompts(2)
    empty, full = (actor.generate_sequences(rows, 2, roles.PARAMS) for rows in (prompts[:0], prompts))
    assert len(empty) == 0 and empty.columns == full.columns
    assert {n: c.dtype for n, c in empty.batch.items()} == {n: c.dtype for n, c in full.batch.items()}
    assert isinstance(DataProto.concat([empty, full]).ragged("tokens"), Ragged)
