"""Whole runs of a mixture of experts whose updates replay the choice of experts."""

import pytest

from tandem.errors import ConfigError, ModelError
from tandem.models.routing import ROUTED
from tandem.observability.reading import Run
from tandem.observability.run import read_batch
from tandem.trainer.replay import replay
from tests.support.families import make_family
from tests.support.refusing import refused
from tests.support.runs import assert_same
from tests.support.tiny import make_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
UPDATES = "A.ppo_mini_batch_size=2 A.ppo_epochs=2 data.max_response_length=24 FS.dtype=bf16"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("mixture"), kind="qwen3_moe", **EXPERTS)


@pytest.fixture(scope="module")
def of(lab, mixture):
    """Return a function that makes the words of a run with a mode of replay."""
    return lambda mode: f"M.path={mixture} {lab.letters} {UPDATES} A.router_replay.mode={mode}"


def test_training_and_rollout_agree_about_the_experts(lab, of):
    runs = {mode: lab.run(mode, of(mode), "trainer.save_freq=1") for mode in ("disabled", "R2", "R3")}
    gaps = {mode: sum(row["rollout/log_prob_diff_max"] for row in run.rows) for mode, run in runs.items()}
    assert gaps["R3"] < 0.5 * gaps["disabled"] and gaps["R2"] > gaps["R3"]
    assert all(0 < row["rollout/experts_differ"] < 0.05 for row in runs["R3"].rows)
    assert "router/differs" not in runs["disabled"].rows[0]
    for mode in ("R2", "R3"):
        run = runs[mode]
        assert all(0 < row["router/differs"] < 0.5 and row["actor/grad_norm"] > 0.01 for row in run.rows)
        batch = read_batch(run.folder / "samples" / "step_000002.parquet")
        assert batch.ragged(ROUTED).values.shape == (len(batch.ragged("tokens").values), 2, 2)
        assert replay(Run(run.folder), 2).equal
    assert_same(lab.resumed("R3 killed", of("R3"), "trainer.save_freq=1", at=2), runs["R3"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["", "A.ulysses_sequence_parallel_size=2", "M.lora_rank=4", "A.use_kl_loss=true GAE"]
)
def test_two_ranks_on_ray(lab, of, ray_cluster, words):
    run = lab.run(f"ray {words}", of("R3"), words, "data.train_batch_size=2 trainer.n_gpus_per_node=2")
    assert all(0 < row["router/differs"] < 0.5 for row in run.rows)
    assert all(row["rollout/log_prob_diff_mean"] < 0.02 for row in run.rows)


@pytest.mark.slow
def test_sequences_in_rows_replay_what_transformers_generated(lab, tmp_path):
    words = f"M.path={make_family(tmp_path, 'qwen3_next')} {lab.letters} R.name=hf A.router_replay.mode=R3"
    run = lab.run("rows", words, "A.ppo_mini_batch_size=2")
    for row in run.rows:
        assert row["rollout/experts_differ"] < 1e-3 and row["rollout/log_prob_diff_max"] < 1e-4
        assert 0 < row["router/differs"] < 0.5


@pytest.mark.parametrize(("words", "kind"), [
    ("A.router_replay.mode=R3", ModelError), ("A.router_replay.mode=R2", ModelError),
    ("A.router_replay.mode=R3 R.name=vllm R.mode=server", ConfigError),
    ("A.router_replay.mode=R3 R.name=vllm R.enable_prefix_caching=false", ConfigError),
    ("A.router_replay.mode=R3 R.name=sglang", ConfigError),
    ("A.router_replay.mode=R2 FS.pipeline_parallel_size=2", ConfigError),
    ("A.router_replay.mode=R2 C.bypass_mode=true", ConfigError),
])  # fmt: skip
def test_what_cannot_be_replayed_is_refused(lab, words, kind):
    error = refused(kind, lambda: lab.run("never", lab.letters, words))
    assert "router_replay.mode" in str(error)
