import pytest
import torch

from tandem.observability.timers import read_timeline
from tandem.protocol import DataProto, Ragged
from tests.workers import roles

COLUMNS = {"tokens": torch.int64, "response_mask": torch.bool, "policy_version": torch.int32}
COLUMNS |= dict.fromkeys(("rollout_log_probs", "old_log_probs", "ref_log_probs", "values"), torch.float64)
COLUMNS |= {"token_level_scores": torch.float32}


@pytest.fixture(scope="module")
def one(folder):
    return roles.program(roles.Team(roles.make_config(folder, run=folder / "one"), 0, 1))


@pytest.fixture(scope="module")
def four(folder):
    return roles.on_ranks("all_roles", folder, 4)


@pytest.mark.slow
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


def test_a_stream_gives_the_rows_of_generate_sequences(one, four):
    """Two prompts with two samples each give at most four parts, and a rank without prompts gives none."""
    for name, shares in (("streamed", [4, 4, 4, 2]), ("streamed few", [2, 2, 2, 0])):
        assert [sum(sizes) for sizes, _ in four[name]] == shares
        assert all(same for _, same in four[name])
        assert four[name][-1][0] == [] or shares[-1]
    assert four["moved"] is one["moved"] is True  # to a rollout of its own
    assert [roles.versions(four[step]["batch"]) for step in ("first", "second")] == [{0}, {1}]


def test_each_rank_keeps_its_share_of_a_bad_batch(four):
    shares = four["first"]["batch"].chunk(4)
    for rank, (field, name, saved) in enumerate(four["non_finite"]):
        assert (field, name) == ("actor update 2", f"actor_update_2_rank_{rank}.pt")
        assert saved.ragged("tokens").equal(shares[rank].ragged("tokens"))
        assert bool(saved.ragged("advantages").values.isnan().any()) == (rank == 3)
    assert all(torch.equal(four["after"][name], value) for name, value in four["weights"].items())


def test_metrics_of_ranks_are_averaged_summed_or_the_greatest(one, four):
    found, alone, ranks = (
        four["first"]["observed"], one["first"]["observed"], four["first"]["observed by rank"]
    )  # fmt: skip
    for role in ("actor", "ref", "critic", "reward_model"):
        bytes_, seconds = f"perf/collective_bytes/{role}", f"perf/collective_s/{role}"
        assert found[bytes_] > alone[bytes_] == 0 and 0 < found[seconds] < 200
        for name in (bytes_, seconds):
            assert found[name] == pytest.approx(sum(rank[name] for rank in ranks) / 4)
    assert [rank["rollout/peak_running"] for rank in ranks] == [4, 4, 4, 2]
    for name in ("rollout/peak_running", "rollout/decode_steps", "rollout/cache_bytes"):
        assert found[name] == max(rank[name] for rank in ranks) > 0
    for name in ("rollout/generated_tokens", "rollout/prefill_tokens", "rollout/decode_steps"):
        assert found[name] == alone[name], name


def test_the_timeline_has_every_role_of_every_rank(four, folder):
    events = read_timeline(folder / "run" / "timeline.json")
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"}
    phases = {(names[event["pid"], event["tid"]], event["name"]) for event in events if event["ph"] == "B"}
    wanted = {"actor": ("gen", "old_log_prob", "ref"), "critic": ("values",), "reward_model": ("reward",)}
    for role, of_role in wanted.items():
        assert {(f"{role} rank {rank}", phase) for rank in range(4) for phase in of_role} <= phases


def test_a_batch_of_no_samples_has_all_columns(config):
    actor, prompts = roles.make_actor(config, "actor", "rollout"), roles.make_prompts(2)
    empty, full = (actor.generate_sequences(rows, 2, roles.PARAMS) for rows in (prompts[:0], prompts))
    assert len(empty) == 0 and empty.columns == full.columns
    assert {n: c.dtype for n, c in empty.batch.items()} == {n: c.dtype for n, c in full.batch.items()}
    assert isinstance(DataProto.concat([empty, full]).ragged("tokens"), Ragged)
