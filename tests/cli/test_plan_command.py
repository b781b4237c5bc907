"""`tandem plan`: its output, refusals and imports."""

import json
import subprocess
import sys

import pytest

from tandem.cli.main import main

SEVEN = ("actor_rollout_ref.model.path=Qwen/Qwen2.5-7B", "algorithm.adv_estimator=grpo")
BUDGET = (
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
)


def test_a_run_that_fits(capsys):
    assert main(["plan", *SEVEN, *BUDGET, "--devices", "8x80GB"]) == 0
    out = capsys.readouterr().out
    assert "7.62B parameters, 8 devices of 80.0 GiB" in out and "GiB free" in out
    assert {line.split("  ")[0] for line in out.splitlines()} >= {"rollout", "old log-probs", "actor update"}


def test_a_run_that_does_not_fit_is_told_what_to_change(capsys):
    assert main(["plan", *SEVEN, *BUDGET, "--device=24GB"]) == 1
    out = capsys.readouterr().out
    assert "GiB missing" in out and "actor_rollout_ref.actor.optim.optimizer=adamw_cpu" in out


def test_the_plan_for_programs(capsys):
    assert main(["plan", *SEVEN, "--devices", "16x141GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    worst = max(found["phases"], key=lambda phase: phase["needed"])
    assert found["fits"] and worst["name"] == found["worst"] and found["device"] == 141 * 2**30
    assert found["margin"] == pytest.approx(found["device"] - worst["needed"])
    assert all(phase["total"] == pytest.approx(sum(phase["parts"].values())) for phase in found["phases"])


def test_seconds(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = [*SEVEN, *BUDGET, "trainer.total_training_steps=100", "--lengths", "400", "--json", "--devices"]
    found = []
    for devices in ("8x80GB", "8xH100"):
        assert main(["plan", *words, devices]) == 0
        found.append(json.loads(capsys.readouterr().out)["time"])
    floor, named = found
    assert "floors" in floor["by"] and "default factors for H100" in named["by"]
    for each in found:
        step = each["phases"]["step"]
        assert step == pytest.approx(sum(each["phases"].values()) - step)
        assert each["device_hours"] == pytest.approx(8 * 24 * each["days"])
        assert each["days"] == pytest.approx(100 * step / 86400)
    assert named["phases"]["update_actor"] > 2.9 * floor["phases"]["update_actor"]


def test_fit_writes_a_config_that_fits(capsys, tmp_path):
    out = tmp_path / "fit.yaml"
    assert main(["plan", *SEVEN, "--fit", "8x40GB", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"wrote {out}" in said and "rollout.tensor_model_parallel_size: 1 -> 4" in said
    assert main(["plan", str(out), "--device", "40GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["margin"] >= 0.05 * found["device"]


def test_fit_says_what_is_nearest(capsys, tmp_path):
    out = tmp_path / "fit.yaml"
    words = ["actor_rollout_ref.model.path=Qwen/Qwen2.5-32B", "algorithm.adv_estimator=grpo"]
    assert main(["plan", *words, "--fit=1x24GB", f"--out={out}"]) == 1
    assert "GiB more" in capsys.readouterr().err and not out.exists()


def test_a_folder_is_read(tmp_path, capsys):
    stored = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    stored |= {"num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert main(["plan", f"actor_rollout_ref.model.path={tmp_path}", "trainer.device=cpu"]) == 0
    assert "actor update" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("actor_rollout_ref.model.path=gpt2",), "nor the name of a known model"),
        ((*SEVEN, "--device", "80"), "not a size of devices"),
        ((*SEVEN, "--devices", "9x80GB"), "cannot be split evenly"),
        ((*SEVEN, "trainer.n_gpu=8"), "unknown key"),
        ((), "actor_rollout_ref.model.path: missing"),
    ],
)
def test_what_is_refused(words, said, capsys):
    assert main(["plan", *words]) == 1
    assert said in capsys.readouterr().err


def test_it_imports_no_torch():
    words = ["plan", "actor_rollout_ref.model.path=meta-llama/Llama-3.1-70B", "--devices", "64x80GB"]
    code = (
        "import sys; from tandem.cli.main import main; main(sys.argv[1:]); "
        "print({'torch', 'transformers', 'ray', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()" and "actor update" in done.stdout
