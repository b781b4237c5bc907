import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

import tandem
from tandem.config.rollout import RolloutConfig, ServerConfig
from tandem.engines.rollout.vllm import process
from tandem.errors import ConfigError
from tandem.observability.run import RunFolder
from tandem.trainer import assembly, here
from tandem.trainer.telling import beginning, ending, parameters, short
from tests.support.tiny import make_model

OFFLOAD = "actor_rollout_ref.actor.fsdp_config.param_offload"
HOST = "actor_rollout_ref.actor.optim.optimizer=adamw_cpu"
ACTIVATIONS = "actor_rollout_ref.model.enable_activation_offload"


@pytest.mark.parametrize(
    ("backend", "device", "told"),
    [("local", "auto", True), ("local", "cpu", True), ("ray", "cpu", True), ("ray", "auto", False)],
)
def test_offload_without_effect(lab, monkeypatch, backend, device, told):
    """On Ray, this machine's devices are not the workers' devices, so there is no message."""
    monkeypatch.setattr(assembly, "make_backend", Mock(side_effect=ConfigError("no backend here")))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said: list[str] = []
    where = f"trainer.backend={backend} trainer.device={device}"
    words = ("A.fsdp_config.param_offload=true M.enable_activation_offload=true", HOST, where)
    with pytest.raises(ConfigError, match="no backend here"):
        lab.trainer(lab.folder / "unmade", *words, said=said)
    sentences = [
        f"{OFFLOAD}, {HOST}: no effect on a CPU, where everything is in host memory already.",
        f"{ACTIVATIONS}: on a CPU nothing is moved; its size is only counted.",
    ]
    assert said == sentences * told


@pytest.mark.parametrize(
    "words",
    ["A.use_kl_loss=true A.kl_loss_type=", "algorithm.use_kl_in_reward=true algorithm.kl_penalty="],
)
def test_a_kl_estimate_that_cannot_be_used_is_refused_before_anything_is_made(lab, monkeypatch, words):
    monkeypatch.setattr(assembly, "make_backend", lambda *_: pytest.fail("a backend is made"))
    own = lab.folder / "own_kl.py"
    own.write_text("def distance(log_probs, reference):\n    return log_probs - reference\n")
    with pytest.raises(ConfigError, match="'reference' is not a column"):
        lab.trainer(lab.folder / "unmade", f"{words}{own}:distance")


def test_a_rollout_on_vllm_needs_vllm(monkeypatch):
    for module in (here, process):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    config: Any = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=RolloutConfig(name="vllm")))
    with pytest.raises(ConfigError, match="vLLM is not installed") as caught:
        here._rollout_package(config)
    assert caught.value.field == "actor_rollout_ref.rollout.name" and caught.value.got == "vllm"


@pytest.mark.parametrize("python", [None, "/no/such/python"])
def test_a_rollout_on_sglang_needs_a_python_with_sglang(python):
    rollout = RolloutConfig(name="sglang", server=ServerConfig(python=python))
    with pytest.raises(ConfigError, match="SGLang is not installed") as caught:
        here._rollout_package(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    assert caught.value.got == f"sglang, with {python or sys.executable}"


def test_parameters_are_counted_from_the_headers(tmp_path):
    assert parameters(tmp_path) is None
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(())}, tmp_path / "two.safetensors")
    assert parameters(tmp_path) == 23
    (tmp_path / "three.safetensors").write_bytes(b"torn")
    assert parameters(tmp_path) is None
    assert [short(n) for n in (23, 21_700, 1_061_000, 7_615_616_512)] == ["23", "21.7 k", "1.06 M", "7.62 B"]


def test_a_beginning_says_what_is_trained_on_what_and_where(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": torch.zeros(100, 50)}, tmp_path / "model.safetensors")
    told = beginning(str(tmp_path), 1234, "64 prompts × 8 responses", 5000, Path("out"), None)
    steps = "5,000 steps of 64 prompts × 8 responses"
    assert told == f"{tmp_path} (llama, 5 k parameters); 1,234 rows; {steps}; new run in out"
    again = beginning(str(tmp_path), 1, "1 row", 2, Path("out"), Path("out/checkpoints/step_000007"))
    assert again.endswith("resumes from step_000007 in out")


def test_an_ending_says_first_last_and_best_and_the_next_command(tmp_path):
    folder = RunFolder(tmp_path)
    folder.event("start", step=0, total_steps=3)
    for step, reward in enumerate((0.25, 0.75, 0.5), 1):
        folder.log_metrics(step, {"reward/mean": reward, "timing/step": 30.0})
    checkpoint = tmp_path / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    told = ending(tmp_path, steps_taken=3).splitlines()
    assert told[0].startswith("3 steps in ")
    assert told[1] == "reward/mean: first 0.250, last 0.500, best 0.750 at step 2"
    assert told[2] == f"model: {checkpoint}"
    assert told[3:] == [f"next:  tandem samples {tmp_path} --worst", f"       tandem export {tmp_path} DIR"]
    folder.event("end", step=3, how="finished")
    assert ending(tmp_path, steps_taken=0).startswith(f"{tmp_path} has already taken all 3 steps: ")


def test_a_run_without_samples_is_not_sent_to_its_samples(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log_metrics(1, {"sft/loss": 1.0})
    (tmp_path / "config.yaml").write_text("trainer: {seed: 0}\n", encoding="utf-8")
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    told = ending(tmp_path, steps_taken=1)
    assert f"tandem export {tmp_path}" in told and "tandem samples" not in told


def test_a_loss_is_best_where_it_is_lowest(tmp_path):
    folder = RunFolder(tmp_path)
    for step, loss in enumerate((3.0, 1.0, 2.0), 1):
        folder.log_metrics(step, {"sft/loss": loss})
    assert "sft/loss: first 3.000, last 2.000, best 1.000 at step 2" in ending(tmp_path, steps_taken=3)


ROWS = [{"prompt": "1+1="}, {"prompt": "1" * 20}]


def right(prompt, response):
    return float("2" in response)


def run(folder, response, rows=ROWS, val=None, **changes):
    model = make_model(folder / "model", max_position_embeddings=24, **changes)
    config = {"data.max_response_length": response, "actor_rollout_ref.rollout.n": 2, "trainer.logger": []}
    return tandem.train(model, train=rows, val=val, rewards=right, steps=1, out=folder / "run", config=config)


@pytest.mark.slow
def test_data_that_fit_exactly_run(tmp_path):
    assert run(tmp_path, 4).state == "finished"  # data.max_prompt_length keeps its default of 512


@pytest.mark.parametrize("held_out", [False, True])
def test_one_token_more_is_refused_with_both_keys_and_the_sum(tmp_path, held_out):
    with pytest.raises(ConfigError, match=re.escape("20 (of at most 512) + 5 = 25")) as caught:
        run(tmp_path, 5, *((ROWS[:1], ROWS) if held_out else (ROWS,)))
    told = str(caught.value)
    assert "data.max_prompt_length + data.max_response_length" in told
    assert "max_position_embeddings = 24" in told
    assert not list((tmp_path / "run").glob("checkpoints/*"))
