import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import trusted
from tandem.checkpoint.manager import open_checkpoint
from tandem.cli.main import main
from tandem.errors import CheckpointError, ConfigError, ConfigErrors
from tandem.observability.reading import Run
from tandem.trainer.replay import replay
from tests.support.evil import Runs, put_contents, put_data, put_state
from tests.support.viewing import viewing
from tests.support.warm import run as run_process

STEP = "step_000001"


@pytest.fixture(scope="module")
def run(lab):
    return lab.run("run", "trainer.save_freq=1 trainer.max_ckpt_to_keep=null")


@pytest.fixture
def strangers(run, tmp_path, monkeypatch):
    """Copy the run as if another user had made it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(trusted.TRUST, "")
    return shutil.copytree(run.folder, tmp_path / "strangers")


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "canary"


PUTS: dict[str, Callable[[Path, Any], None]] = {
    "state": lambda folder, thing: put_state(folder, {"loader": thing}),
    "contents": lambda folder, thing: put_contents(folder / "actor", thing),
    "data": lambda folder, thing: put_data(folder / "actor", thing),
}


@pytest.fixture(params=PUTS)
def spoilt(request, strangers, canary):
    for checkpoint in (strangers / "checkpoints").iterdir():
        PUTS[request.param](checkpoint, Runs(os.system, f"touch {canary}"))
    return strangers


@pytest.mark.slow
def test_export_refuses_it(spoilt, canary, capsys):
    out = canary.with_name("out")
    for given in (spoilt, spoilt / "checkpoints" / STEP):
        assert main(["export", str(given), str(out)]) == 1
        assert "Traceback" not in capsys.readouterr().err
    assert not canary.exists() and not out.exists()


def test_a_replay_refuses_it_and_a_run_does_not_go_on_from_it(lab, spoilt, canary):
    with pytest.raises(CheckpointError):
        replay(Run(spoilt), 2)
    one = f"trainer.resume_mode=resume_path trainer.resume_from_path={spoilt / 'checkpoints' / STEP}"
    for folder, words in ((spoilt, "steps=3"), (canary.with_name("own"), one)):
        with pytest.raises(CheckpointError):
            lab.run(str(folder), "trainer.resume_with_changes=true", words)
    assert not canary.exists()


def test_what_needs_no_checkpoint_is_shown(spoilt, canary):
    for words in (["runs", str(spoilt.parent)], ["runs", str(spoilt), "--json"], ["samples", str(spoilt)]):
        assert main(words) == 0
    with viewing(spoilt) as client:
        (listed,) = client.ask("runs")
        for page in ("metrics", "config", "events", "samples", "export"):
            assert client.get(f"api/{page}?run={listed['run']}&names=actor/loss&name=actor/loss")[0] == 200
    assert not canary.exists()


def test_a_config_that_would_build_objects_is_refused(lab, strangers, canary):
    file = strangers / "config.yaml"
    file.write_text(file.read_text() + f"x: !!python/object/apply:os.system ['touch {canary}']\n")
    assert main(["export", str(strangers), str(canary.with_name("out"))]) == 1
    assert main(["replay", str(strangers)]) == 1
    assert main(["samples", str(strangers)]) in (0, 1)
    assert main(["runs", str(strangers.parent)]) == 0
    with pytest.raises((ConfigError, ConfigErrors)):
        lab.run(str(strangers), "trainer.total_training_steps=3")
    assert not canary.exists()


CODE = "import pathlib\npathlib.Path({canary!r}).touch()\ndef function(*given, **named):\n    return 0.0\n"
FUNCTION = "{file}:function"
NAMED = {
    "algorithm.adv_estimator": FUNCTION,
    "actor_rollout_ref.actor.policy_loss.loss_mode": FUNCTION,
    "trainer.worker_classes": {"actor": "{file}:Actor"},
    "trainer.cluster.ray_init": {"runtime_env": {"py_executable": "{file}"}},
}
MORE = NAMED | {"custom_reward_function.path": "subprocess", "reward.combine": FUNCTION}
MORE |= {"custom_reward_function.terms": [{"name": "function", "path": "{file}"}]}
MORE |= {"data.custom_cls.path": "{file}", "data.sampler.class_path": "{file}"}
MORE |= {"trainer.on_step": "os:system", "trainer.project_name": "${oc.env:HOME}"}


def edited(folder: Path, key: str, value: Any) -> None:
    file = folder / "config.yaml"
    at = tree = json.loads(json.dumps(Run(folder).config))
    *path, last = key.split(".")
    for part in path:
        at = at[part]
    at[last] = value
    file.write_text(json.dumps(tree))  # JSON is also valid YAML


def name_code(folder: Path, key: str, value: Any, canary: Path) -> None:
    evil = folder / "evil.py"
    evil.write_text(CODE.format(canary=str(canary)))
    edited(folder, key, json.loads(json.dumps(value).replace("{file}", str(evil))))


@pytest.mark.parametrize("key", NAMED)
def test_a_replay_runs_no_code_that_the_config_names(key, strangers, canary):
    name_code(strangers, key, NAMED[key], canary)
    with pytest.raises(ConfigError) as caught:
        replay(Run(strangers), 2)
    assert caught.value.field == str(strangers / "config.yaml")
    assert key in str(caught.value.got) and trusted.TRUST in str(caught.value.remedy)
    assert not canary.exists()


@pytest.mark.parametrize("key", MORE)
def test_a_config_in_a_strangers_folder_runs_no_code(key, strangers, canary, capsys):
    name_code(strangers, key, MORE[key], canary)
    words = [str(strangers / "config.yaml"), f"trainer.default_local_dir={canary.with_name('own')}"]
    for command in ("train", "check"):
        assert main([command, *words]) != 0
        assert trusted.TRUST in capsys.readouterr().err
    assert not canary.exists() and not canary.with_name("own").exists()


@pytest.fixture
def model_with_code(lab, strangers, canary):
    folder = strangers / "model"
    shutil.copytree(lab.model, folder)
    (folder / "own.py").write_text(
        f"open({str(canary)!r}, 'w')\nfrom transformers import Qwen2Config as C, Qwen2ForCausalLM as M\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps(config))
    edited(strangers, "actor_rollout_ref.model.path", str(folder))
    edited(strangers, "actor_rollout_ref.model.tokenizer_path", str(folder))
    return folder


@pytest.mark.parametrize("remote", [True, False])
def test_a_model_folders_code_is_not_run(remote, strangers, model_with_code, canary):
    edited(strangers, "actor_rollout_ref.model.trust_remote_code", remote)
    assert main(["export", str(strangers), str(canary.with_name("out"))]) == 1
    assert main(["replay", str(strangers)]) == 1
    assert not canary.exists()


@pytest.mark.usefixtures("model_with_code")
def test_it_is_run_where_the_user_says_so(strangers, canary):
    """The code runs in another process, because what it defines stays registered in transformers."""
    edited(strangers, "actor_rollout_ref.model.trust_remote_code", True)
    command = [sys.executable, "-m", "tandem", "export", strangers, canary.with_name("out")]
    run_process(command, env=os.environ | {trusted.TRUST: str(strangers)})
    assert canary.exists()


def test_weights_that_run_code_are_not_read(lab, tmp_path, canary):
    model = shutil.copytree(lab.model, tmp_path / "model")
    (model / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Runs(os.system, f"touch {canary}")}, model / "pytorch_model.bin")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1="}\n')
    words = [f"model.path={model}", f"data.path={prompts}", f"data.output_path={tmp_path / 'out.jsonl'}"]
    assert main(["generate", *words]) == 1
    assert not canary.exists()


def test_a_strangers_folder_without_code_is_read_as_ones_own(strangers, canary):
    assert main(["export", str(strangers), str(canary.with_name("out"))]) == 0
    assert replay(Run(strangers), 2).equal
    assert open_checkpoint(strangers / "checkpoints" / STEP).step == 1
