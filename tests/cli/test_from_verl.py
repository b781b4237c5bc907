"""`--from-verl`: shell scripts that call verl, given to `tandem check` and `tandem train`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tandem.cli.from_verl import Request, requested
from tandem.cli.main import main
from tandem.errors import TandemError

MAIN = "python3 -m verl.trainer.main_ppo"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script that trains a model in its folder, in an environment that the process may keep."""
    monkeypatch.chdir(tmp_path)
    for name in ("NCCL_DEBUG", "VERL_LOGGING_LEVEL", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work" / "model").mkdir(parents=True)
    parquet.write_table(pyarrow.table({"prompt": ["a"] * 2000}), tmp_path / "work" / "train.parquet")
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / "work" / "model" / name).write_text("{}")
    path = tmp_path / "run.sh"
    path.write_text(
        "set -eux\nexport NCCL_DEBUG=INFO VERL_LOGGING_LEVEL=DEBUG WANDB_API_KEY=hidden\n"
        "pip install verl\ncd work\nDATA=$PWD/train.parquet\n"
        f"{MAIN} data.train_files=\"['$DATA']\" +trainer.seed=4 \\\n"
        '    actor_rollout_ref.model.path=model trainer.logger=\'["console"]\' "$@" 2>&1 | tee log\n'
    )
    yield path
    for name in ("NCCL_DEBUG", "VERL_LOGGING_LEVEL", "WANDB_API_KEY"):
        os.environ.pop(name, None)


def test_the_words_of_a_request():
    assert requested(["a=b", "-x"]) is None
    words = ["a=b", "--from-verl", "run.sh", "--call=2", "--script-limit", "9", "c=d", "--", "e=f", "--call"]
    assert requested(words) == Request("run.sh", ("e=f", "--call"), 2, 9.0, ("a=b", "c=d"))


@pytest.mark.parametrize("words", ["=x --call 1.5", "=x --call=0", "=x --call= 2", "=x --call", ""])
def test_requests_that_are_not_understood(words, typed):
    status, _, err = typed("train", *f"--from-verl{words}".split())
    assert status == 2 and err.startswith("tandem train: ")


def beginnings(text: str) -> list[list[str]]:
    """Return the first three words of each line."""
    return [line.split()[:3] for line in text.splitlines()]


def test_check_shows_the_translation(script, typed):
    words = ["trainer.ray_wait_register_center_timeout=9", "actor_rollout_ref.hybrid_engine=True"]
    status, out, err = typed("check", "--from-verl", script, "--", *words)
    assert status == 0 and "the config is sound" in out and "not run: pip install verl" in err
    assert f"paths are relative to {script.parent / 'work'}" in err and "hidden" not in err
    for line in ("NCCL_DEBUG INFO acts", "VERL_LOGGING_LEVEL DEBUG ignored",
                 "trainer.ray_wait_register_center_timeout 9 renamed",
                 "actor_rollout_ref.hybrid_engine True ignored"):  # fmt: skip
        assert line.split() in beginnings(err)
    assert err.count("hybrid_engine") == 1
    assert os.environ["NCCL_DEBUG"] == "INFO"


def test_what_is_refused_stands_in_the_table(script, refused):
    words = ["check", "--from-verl", script, "trainer.nnodes=0", "--", "trainer.no_such_key=1"]
    error = refused(*words)
    assert ["trainer.no_such_key", "refused", "unknown"] in beginnings(error)
    assert ["trainer.nnodes", "0", "refused"] in beginnings(error)
    assert "2 of the script's settings cannot be used" in error


def test_a_dry_run_prints_the_config(script, printed):
    shown = printed("train", "--from-verl", script, "--dry-run", "trainer.seed=8")
    assert "  seed: 8\n" in shown and "  defaults: verl\n" in shown


@pytest.fixture
def runs(script: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces the run, and adds a line to the end of the script."""

    def replace(run_ppo: Callable[..., Any], line: str) -> None:
        monkeypatch.setattr("tandem.trainer.run.run_ppo", run_ppo)
        monkeypatch.setattr("tandem.cli.train.lacking", lambda config: [])
        script.write_text(script.read_text().replace("pip install verl", "") + line)

    return replace


def test_training_stands_in_for_the_call(script, runs, capfd):
    seen = []

    def run_ppo(config, say):
        seen.append((config.trainer.seed, os.getcwd(), os.environ["NCCL_DEBUG"]))
        return False

    runs(run_ppo, "echo went on >&2\n")
    assert main(["train", "--from-verl", str(script)]) == 0
    assert seen == [(4, str(script.parent / "work"), "INFO")]
    assert "went on" in capfd.readouterr().err


def test_a_failed_run_ends_the_script(script, runs):
    def run_ppo(config, say):
        raise TandemError("no")

    runs(run_ppo, "touch after\n")
    assert main(["train", "--from-verl", str(script)]) == 1
    assert not (script.parent / "work" / "after").exists()
