"""`tandem plan`: its output, refusals and imports."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.tiny import make_model

SEVEN = ("actor_rollout_ref.model.path=Qwen/Qwen2.5-7B", "algorithm.adv_estimator=grpo")
BUDGET = (
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
)


def test_a_run_that_fits(printed):
    out = printed("plan", *SEVEN, *BUDGET, "--devices", "8x80GB")
    assert "7.62B parameters, 8 devices of 80.0 GiB" in out and "GiB free" in out
    assert {line.split("  ")[0] for line in out.splitlines()} >= {"rollout", "old log-probs", "actor update"}


def test_a_small_model_is_not_rounded_to_nothing(printed, tmp_path):
    model = make_model(tmp_path, vocab_size=1000)
    words = (f"actor_rollout_ref.model.path={model}", *SEVEN[1:], *BUDGET, "--device", "24GB")
    assert re.search(r": \d{2,3}\.\dk parameters, 1 device of 24.0 GiB", printed("plan", *words))


def test_a_run_that_does_not_fit_is_told_what_to_change(typed):
    status, out, _ = typed("plan", *SEVEN, *BUDGET, "--device=24GB")
    assert status == 1
    assert "GiB missing" in out and "actor_rollout_ref.actor.optim.optimizer=adamw_cpu" in out


def test_the_plan_for_programs(printed):
    found = json.loads(printed("plan", *SEVEN, "--devices", "16x141GB", "--json"))
    worst = max(found["phases"], key=lambda phase: phase["needed"])
    assert found["fits"] and worst["name"] == found["worst"] and found["device"] == 141 * 2**30
    assert found["margin"] == pytest.approx(found["device"] - worst["needed"])
    assert all(phase["total"] == pytest.approx(sum(phase["parts"].values())) for phase in found["phases"])


def test_seconds(printed, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = [*SEVEN, *BUDGET, "trainer.total_training_steps=100", "--lengths", "400", "--json", "--devices"]
    floor, named = (json.loads(printed("plan", *words, at))["time"] for at in ("8x80GB", "8xH100"))
    assert "floors" in floor["by"] and "default factors for H100" in named["by"]
    for each in (floor, named):
        step = each["phases"]["step"]
        assert step == pytest.approx(sum(each["phases"].values()) - step)
        assert each["device_hours"] == pytest.approx(8 * 24 * each["days"])
        assert each["days"] == pytest.approx(100 * step / 86400)
    assert named["phases"]["update_actor"] > 2.9 * floor["phases"]["update_actor"]


def test_fit_writes_a_config_that_fits(printed, tmp_path):
    out = tmp_path / "fit.yaml"
    said = printed("plan", *SEVEN, "--fit", "8x40GB", "--out", out)
    assert str(out) in said and "rollout.tensor_model_parallel_size: 1 -> 4" in said
    found = json.loads(printed("plan", out, "--device", "40GB", "--json"))
    assert found["margin"] >= 0.05 * found["device"]


def test_fit_says_what_is_nearest(refused, tmp_path):
    out = tmp_path / "fit.yaml"
    words = ["actor_rollout_ref.model.path=Qwen/Qwen2.5-32B", "algorithm.adv_estimator=grpo"]
    assert "GiB more" in refused("plan", *words, "--fit=1x24GB", f"--out={out}") and not out.exists()


def test_a_folder_is_read(tmp_path, printed):
    stored = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    stored |= {"num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    words = ("plan", f"actor_rollout_ref.model.path={tmp_path}", "trainer.device=cpu")
    assert "actor update" in printed(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("actor_rollout_ref.model.path=gpt2",), "nor the name of a known model"),
        ((*SEVEN, "--device", "80"), "not a size of devices"),
        ((*SEVEN, "--devices", "9x80GB"), "got:      9"),
        ((*SEVEN, "trainer.n_gpu=8"), "unknown key"),
        ((), "actor_rollout_ref.model.path: missing"),
    ],
)
def test_what_is_refused(words, said, refused):
    assert said in refused("plan", *words)


def test_it_imports_no_torch():
    words = ["plan", "actor_rollout_ref.model.path=meta-llama/Llama-3.1-70B", "--devices", "64x80GB"]
    code = (
        "import sys; from tandem.cli.main import main; main(sys.argv[1:]); "
        "print({'torch', 'transformers', 'ray', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()" and "actor update" in done.stdout
