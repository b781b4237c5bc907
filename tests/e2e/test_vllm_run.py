"""A run on Ray that samples with one vLLM engine over the ranks of its actor; see `make test-vllm`."""

import pytest
from transformers import AutoTokenizer

from tandem.observability.reading import Run
from tandem.trainer.replay import replay
from tests.engines.rollout.vllm.models import build
from tests.support.families import make_family
from tests.support.runs import Lab

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
pytest.importorskip("tandem.engines.rollout.vllm.engine", exc_type=ImportError)
pytest.importorskip("ray")

STEPS = 2
KEYS = (
    "R.name=vllm R.tensor_model_parallel_size=2 R.max_num_seqs=8 A.use_kl_loss=true",
    "A.fsdp_config.model_dtype=fp32 REF.fsdp_config.model_dtype=fp32",
    f"trainer.n_gpus_per_node=2 trainer.device=cpu steps={STEPS}",
)


def test_a_policy_learns_from_what_two_ranks_wrote_together(ray_cluster, tmp_path):
    lab = Lab(tmp_path)
    build(vocab_size=len(AutoTokenizer.from_pretrained(lab.model))).save_pretrained(lab.model)
    run = lab.run("split", lab.letters, *KEYS)
    assert [row["step"] for row in run.rows] == [1, 2]
    for row in run.rows:
        assert row["rollout/log_prob_diff_max"] < 1e-4
        assert row["rollout/generated_tokens"] == row["tokens/response"]  # of one engine, not of two
        assert row["actor/grad_norm"] > 0
    found = replay(Run(run.folder), STEPS)  # nothing is generated, so vLLM is not needed
    assert found.equal and found.recorded["actor/grad_norm"] == run.rows[-1]["actor/grad_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_updates_replay_the_experts_that_vllm_recorded(tmp_path, family):
    lab = Lab(tmp_path)
    model = make_family(tmp_path / family, family, head_dim=32, num_hidden_layers=3)
    words = f"M.path={model} R.name=vllm A.router_replay.mode=R3 A.ppo_mini_batch_size=2 steps={STEPS}"
    run = lab.run("run", lab.letters, words, "R.max_num_seqs=8 data.max_response_length=24")
    for row in run.rows:
        assert row["rollout/experts_differ"] < 1e-3 and row["rollout/log_prob_diff_max"] < 1e-4
        assert 0 < row["router/differs"] < 0.5 and row["actor/grad_norm"] > 0
    assert replay(Run(run.folder), STEPS).equal


FAMILIES = ("gemma3_text", "olmo3", "phi3", "gpt_oss", "glm4_moe", "mixtral", "qwen3_moe")
CHANGES = {
    "llama4_text": {
        "interleave_moe_layer_step": 2,
        "moe_layers": [1],
        "attention_chunk_size": 128,
        "num_experts_per_tok": 1,
    },
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "hidden_size": 128},
}
"""Further families, with the layers and sizes that vLLM supports on CPUs."""


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *CHANGES])
def test_windows_fused_layers_stretched_angles_and_experts(tmp_path, family):
    """The trainer uses the classes of transformers with which vLLM runs olmo3.

    The third step samples from weights that have been updated twice.
    """
    lab = Lab(tmp_path)
    sizes = {"head_dim": 32, "initializer_range": 0.06, **CHANGES.get(family, {})}
    model = make_family(tmp_path / family, family, **sizes)
    words = f"M.path={model} R.name=vllm R.max_num_seqs=8 data.max_response_length=24 steps=3"
    rows = lab.run("run", lab.letters, words).rows
    assert len(rows) == 3
    for row in rows:
        assert row["rollout/log_prob_diff_max"] < 1e-4 and row["actor/grad_norm"] > 0
