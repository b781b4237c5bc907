"""A run on Ray that samples with one vLLM engine over the ranks of its actor; see `make test-vllm`."""

import pytest
from transformers import AutoTokenizer

from tandem.observability.reading import Run
from tandem.trainer.replay import replay
from tests.e2e.shop import REWARD
from tests.engines.rollout.vllm.models import build
from tests.support.runs import Lab

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
pytest.importorskip("tandem.engines.rollout.vllm.engine", exc_type=ImportError)
pytest.importorskip("ray")

STEPS = 2
KEYS = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
    "actor_rollout_ref.ref.fsdp_config.model_dtype=fp32",
    "trainer.n_gpus_per_node=2",
    "trainer.device=cpu",
    f"trainer.total_training_steps={STEPS}",
)


def test_a_policy_learns_from_what_two_ranks_wrote_together(ray_cluster, tmp_path):
    lab = Lab(tmp_path)
    build(vocab_size=len(AutoTokenizer.from_pretrained(lab.model))).save_pretrained(lab.model)
    (tmp_path / "reward.py").write_text(REWARD)
    run = lab.run("split", f"custom_reward_function.path={tmp_path / 'reward.py'}", *KEYS)
    assert [row["step"] for row in run.rows] == [1, 2]
    for row in run.rows:
        assert row["rollout/log_prob_diff_max"] < 1e-4
        assert row["rollout/generated_tokens"] == row["tokens/response"]  # of one engine, not of two
        assert row["actor/grad_norm"] > 0
    found = replay(Run(run.folder), STEPS)  # nothing is generated, so vLLM is not needed
    assert found.equal and found.recorded["actor/grad_norm"] == run.rows[-1]["actor/grad_norm"]
