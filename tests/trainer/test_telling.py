"""Messages at the start and the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tandem.observability.run import RunFolder
from tandem.trainer.telling import beginning, ending, parameters, short


def test_parameters_are_counted_from_the_headers(tmp_path: Path) -> None:
    assert parameters(tmp_path) is None
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(())}, tmp_path / "two.safetensors")
    assert parameters(tmp_path) == 23
    (tmp_path / "three.safetensors").write_bytes(b"torn")
    assert parameters(tmp_path) is None


def test_counts_have_three_figures() -> None:
    assert [short(n) for n in (23, 21_700, 1_061_000, 7_615_616_512)] == ["23", "21.7 k", "1.06 M", "7.62 B"]


def test_a_beginning_says_what_is_trained_on_what_and_where(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": torch.zeros(100, 50)}, tmp_path / "model.safetensors")
    told = beginning(str(tmp_path), 1234, "64 prompts × 8 responses", 5000, Path("out"), None)
    assert told == (
        f"{tmp_path} (llama, 5 k parameters); 1,234 rows; 5,000 steps of 64 prompts × 8 responses; "
        "new run in out"
    )
    again = beginning(str(tmp_path), 1, "1 row", 2, Path("out"), Path("out/checkpoints/step_000007"))
    assert again.endswith("resumes from step_000007 in out")


def test_an_ending_says_first_last_and_best_and_the_next_command(tmp_path: Path) -> None:
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


def test_a_run_without_samples_is_not_sent_to_its_samples(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log_metrics(1, {"sft/loss": 1.0})
    (tmp_path / "config.yaml").write_text("trainer: {seed: 0}\n", encoding="utf-8")
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    told = ending(tmp_path, steps_taken=1)
    assert f"tandem export {tmp_path}" in told and "tandem samples" not in told


def test_a_loss_is_best_where_it_is_lowest(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step, loss in enumerate((3.0, 1.0, 2.0), 1):
        folder.log_metrics(step, {"sft/loss": loss})
    assert "sft/loss: first 3.000, last 2.000, best 1.000 at step 2" in ending(tmp_path, steps_taken=3)
