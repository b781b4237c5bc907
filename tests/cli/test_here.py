"""The part of `tandem check` about this machine, this data and this model; tokenizers with too many ids."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from tandem.config.trainer import TrainerConfig
from tandem.errors import ConfigError
from tandem.trainer.here import crowded, refuse
from tests.support.runs import Lab

OWN = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
PYTHON = "ray_kwargs.ray_init.runtime_env.py_executable=no-such-uv run"


@pytest.fixture
def missing(printed, refused, tmp_path):
    """Return a function that checks that a config is sound but its run is refused, with these texts."""

    def check(command: str, given: list[str], *telling: str) -> None:
        checks = ["check", *([] if command == "train" else [f"--{command}"])]
        said = printed(*checks, *given)
        found = [said.index(text) for text in ("the config is sound", *telling)]
        assert found == sorted(found)
        for words in ([*checks, "--here"], [command]):
            assert telling[0] in refused(*words, *given)
        assert not (tmp_path / "run").exists()

    return check


@pytest.mark.parametrize(
    ("words", "telling"),
    [
        (["trainer.backend=ray", PYTHON], "runtime_env.py_executable"),
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
def test_the_config_is_sound_and_the_run_is_refused(lab, tmp_path, missing, words, telling):
    (tmp_path / "own.py").write_text(OWN)
    words = [word.format(own=tmp_path / "own.py") for word in words]
    missing("train", [*lab.overrides(tmp_path / "run"), *words], telling)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_reward_that_does_not_load_is_named_in_time(lab, tmp_path, missing, monkeypatch):
    monkeypatch.setattr("tandem.rewards.calling.LOAD_SECONDS", 0.5)
    own = tmp_path / "own.py"
    own.write_text(f"import time; time.sleep(600)\n{OWN}")
    given = [*lab.overrides(tmp_path / "run"), f"custom_reward_function.path={own}", "reward.timeout=0.5"]
    missing("train", given, "custom_reward_function.path: loading it raised TimeoutError")


def test_several_things_are_said_at_once(lab, tmp_path, refused):
    words = ["data.train_batch_size=4000", "data.max_response_length=1000"]
    error = refused("train", *lab.overrides(tmp_path / "run"), *words)
    telling = ("2 things are wrong or missing", "data.train_batch_size", "max_position_embeddings")
    assert all(text in error for text in telling)
    twice = [ConfigError("two checks find it", field="key") for _ in range(2)]
    with pytest.raises(ConfigError, match=r"^key: two checks find it$"):
        refuse(twice)


@pytest.mark.parametrize("at", ["actor_rollout_ref.model", "critic.model"])
def test_an_unknown_field_of_a_model_has_its_whole_key(lab, tmp_path, refused, at):
    words = ["algorithm.adv_estimator=gae", f"{at}.override_config.rms_norm_epss=1"]
    error = refused("check", *lab.overrides(tmp_path / "run"), *words)
    assert f"{at}.override_config.rms_norm_epss" in error and "did you mean rms_norm_eps?" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="each process has a device")
@pytest.mark.parametrize(
    ("given", "crowd"),
    [("n_gpus_per_node=4", True), ("n_gpus_per_node=2", False), ("resource_pools={a: [2], b: [1]}", True)],
)
def test_more_processes_than_cores_are_told(monkeypatch, given, crowd):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    name, value = given.split("=")
    trainer = TrainerConfig.model_validate({name: yaml.safe_load(value)})
    assert ("at most 2 processes" in (crowded(trainer) or "")) == crowd


def test_where_nothing_is_missing(lab, tmp_path, printed):
    assert printed("check", "--here", *lab.overrides(tmp_path / "run")).endswith("the config is sound\n")


@pytest.mark.parametrize("command", ["sft", "rm"])
def test_a_run_on_examples_has_the_same_two_verdicts(lab, tmp_path, printed, missing, command):
    file = tmp_path / "rows.jsonl"
    row = '{"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}\n'
    file.write_text(row * 256, encoding="utf-8")
    given = [f"data.train_files={file}", f"model.path={lab.model}", "trainer.device=cuda"]
    given += ["trainer.logger=clearml"]  # the run would work without it
    given += [f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert f"`tandem {command}` also needs" in printed("check", f"--{command}", *given)
    missing(command, given, "CUDA", "clearml")


SIZE = 46
SAID = ("smaller than that of the tokenizer", f"{SIZE} tokens", f">= {SIZE + 1}")


@pytest.fixture(scope="module")
def larger(lab: Lab) -> Path:
    """Return a folder with the model's tokenizer plus one token."""
    tokenizer = AutoTokenizer.from_pretrained(lab.model)
    assert len(tokenizer) == SIZE
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(lab.folder / "larger")
    return lab.folder / "larger"


@pytest.mark.parametrize("command", ["train", "sft", "rm", "eval", "generate"])
def test_it_is_named_by_every_command(lab, larger, tmp_path, refused, command):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}) + "\n")
    given = lab.overrides(tmp_path / "run")
    if command in ("sft", "rm"):
        given = [f"data.train_files={file}", "data.train_batch_size=1", "trainer.logger=[]"]
        given += [f"trainer.default_local_dir={tmp_path / 'run'}"]
    elif command != "train":
        given = [f"data.path={lab.train}", "data.max_response_length=2"]
        given += [f"data.output_path={tmp_path / ('out.json' if command == 'eval' else 'out.parquet')}"]
    if command != "train":
        given += [f"model.path={lab.model}", "trainer.device=cpu"]
    at = "actor_rollout_ref.model" if command == "train" else "model"
    checks = {"train": [["check", "--here"]], "sft": [["check", "--sft", "--here"]]}
    checks["rm"] = [["check", "--rm", "--here"]]
    for words in ([command], *checks.get(command, [])):
        error = refused(*words, *given, f"{at}.tokenizer_path={larger}")
        assert all(part in error for part in (*SAID, f"{at}.tokenizer_path")), error
    assert not (tmp_path / "run").exists()


def test_a_critic_reads_the_same_ids(lab, tmp_path, refused):
    critic = tmp_path / "critic"
    shutil.copytree(lab.model, critic)
    stored = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps(stored | {"vocab_size": SIZE - 1}))
    given = [*lab.overrides(tmp_path / "run"), "algorithm.adv_estimator=gae", f"critic.model.path={critic}"]
    for words in (["check", "--here"], ["train"]):
        error = refused(*words, *given)
        assert "critic.model.path" in error and f"{SIZE - 1} tokens" in error
