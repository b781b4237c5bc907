"""The part of `tandem check` about this machine, this data and this model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.cli.main import main
from tests.support.runs import Lab, lab

__all__ = ["lab"]

OWN = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("words", "telling"),
    [
        (
            ["trainer.backend=ray", "ray_kwargs.ray_init.runtime_env.py_executable=no-such-uv run"],
            "runtime_env.py_executable",
        ),
        (["custom_reward_function.path={own}", "custom_reward_function.name=scor"], "no such function"),
        pytest.param(
            ["trainer.device=cuda"],
            "trainer.device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device"),
        ),
        pytest.param(
            ["trainer.device=cuda", "trainer.backend=ray"],
            "trainer.device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device"),
        ),
    ],
)
def test_the_config_is_sound_and_the_run_is_refused(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], telling: str
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    given = [*lab.overrides(tmp_path / "run"), *(word.format(own=own) for word in words)]
    assert main(["check", *given]) == 0
    said = capsys.readouterr().out
    assert said.index("the config is sound") < said.index(telling)
    for command in (["check", "--here"], ["train"]):
        assert main([*command, *given]) == 1
        assert telling in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(120)
def test_a_reward_that_does_not_load_is_named_in_time(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.rewards.calling.LOAD_SECONDS", 0.5)
    own = tmp_path / "own.py"
    own.write_text(f"import time; time.sleep(600)\n{OWN}")
    given = [*lab.overrides(tmp_path / "run"), f"custom_reward_function.path={own}", "reward.timeout=0.5"]
    assert main(["check", *given]) == 0
    assert "custom_reward_function.path: loading it raised TimeoutError" in capsys.readouterr().out
    for command in (["check", "--here"], ["train"]):
        assert main([*command, *given]) == 1
        assert "custom_reward_function.path: loading it raised TimeoutError" in capsys.readouterr().err


def test_several_things_are_said_at_once(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data.train_batch_size=4000", "data.max_response_length=1000"]
    assert main(["train", *lab.overrides(tmp_path / "run"), *words]) == 1
    error = capsys.readouterr().err
    assert "2 things are wrong or missing" in error
    assert "data.train_batch_size" in error
    assert "max_position_embeddings" in error


def test_where_nothing_is_missing(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--here", *lab.overrides(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.endswith("the config is sound\n")


@pytest.mark.parametrize("command", ["sft", "rm"])
def test_a_run_on_examples_has_the_same_two_verdicts(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = tmp_path / "rows.jsonl"
    row = '{"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}\n'
    file.write_text(row * 256, encoding="utf-8")
    given = [f"data.train_files={file}", f"model.path={lab.model}", "trainer.device=cuda"]
    given += ["trainer.logger=clearml"]  # the run would work without it
    given += [f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main(["check", f"--{command}", *given]) == 0
    said = capsys.readouterr().out
    assert (
        said.index("the config is sound")
        < said.index(f"`tandem {command}` also needs")
        < said.index("CUDA")
        < said.index("clearml")
    )
    for words in (["check", f"--{command}", "--here"], [command]):
        assert main([*words, *given]) == 1
        assert "CUDA" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
