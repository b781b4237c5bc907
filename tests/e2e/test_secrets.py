import gzip
import json
import stat
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tandem.cli.main import main
from tandem.config.load import load_train_config
from tandem.errors import ConfigError, ConfigErrors
from tandem.observability.reading import Run
from tandem.trainer.replay import replay
from tandem.trainer.run import run_ppo
from tandem.viewer.api import Api
from tandem.viewer.query import Query
from tandem.viewer.shelf import Shelf
from tests.support.runs import Lab
from tests.support.words import words as full_words

CANARIES = {"CANARY_KEY": "sk-canary-0001-key", "CANARY_NAME": "canary-0002-name"}
CANARIES |= {"CANARY_PATH": "canary-0003-path", "CANARY_URL": "canary-0004-url"}
CANARIES |= {"CANARY_NOTE": "canary-0005\n\"quoted\" 'note'"}
LITERAL = "sk-literal-0006-key"
LOGGERS = [name for name in ("wandb", "mlflow", "swanlab", "clearml", "trackio") if find_spec(name)]
LOGGERS += ["console", "file", "tensorboard"]
OFFLINE = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "CLEARML_OFFLINE_MODE": "1"}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, key, address, other, fail,
                  password, notes):
    assert key == other == "sk-canary-0001-key" and address == "https://canary-0004-url/v1"
    assert password == "sk-literal-0006-key"
    if fail:
        raise RuntimeError(f"401 for {address} with the key {key}")
    return len(set(solution_str)) / 6
"""


@pytest.fixture
def canaries(monkeypatch):
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)


def words_of(lab: Lab, run: Path, *more: str) -> list[str]:
    """Return a command with canaries alone, in text, through a key, in lists and mappings, and in a path."""
    hidden = lab.folder / CANARIES["CANARY_PATH"]
    hidden.mkdir(exist_ok=True)
    (hidden / "score.py").write_text(REWARD)
    (hidden / "train.parquet").write_bytes(Path(lab.train).read_bytes())
    at = "custom_reward_function.reward_kwargs"
    return [
        *lab.overrides(run),
        f"data.train_files=[{lab.folder}/${{oc.env:CANARY_PATH}}/train.parquet]",
        *full_words(f"{lab.validated} trainer.test_freq=1 trainer.log_val_generations=1 trainer.save_freq=1"),
        "trainer.experiment_name=run-${oc.env:CANARY_NAME}-x",
        f"custom_reward_function.path={lab.folder}/${{oc.env:CANARY_PATH}}/score.py",
        *(f"{at}.{word}" for word in ("key=${oc.env:CANARY_KEY}", f"password={LITERAL}", "fail=false")),
        f"{at}.address=https://${{oc.env:CANARY_URL,none}}/v1",
        f"{at}.other=${{oc.select:{at}.key}}",
        f"{at}.notes=[{{text: '${{oc.env:CANARY_NOTE}}'}}]",
        f"trainer.logger={json.dumps(LOGGERS)}",
        *more,
    ]


def held(folder: Path) -> dict[str, list[str]]:
    """Return the files in a folder and the canaries in each; compressed files are also searched unpacked."""
    wanted = {**CANARIES, "LITERAL": LITERAL}
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content += json.dumps(pq.read_table(path).to_pylist(), default=str).encode()
        if content[:2] == b"\x1f\x8b":
            content += gzip.decompress(content)
        names = [name for name, value in wanted.items() if value.split("\n")[0].encode() in content]
        if names:
            found[str(path.relative_to(folder))] = names
    return found


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CANARIES, **OFFLINE, "HOME": str(home), "TRACKIO_DIR": str(home)}.items():
            patch.setenv(name, value)
        patch.chdir(home)
        run_ppo(load_train_config(None, words_of(lab, home / "run")).config, say=print)
    return home / "run"


def test_nothing_of_a_run_holds_what_came_from_the_environment(run):
    assert held(run.parent) == {}
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["trainer"]["experiment_name"] == "run-${oc.env:CANARY_NAME}-x"
    kwargs = config["custom_reward_function"]["reward_kwargs"]
    assert (kwargs["key"], kwargs["password"]) == ("${oc.env:CANARY_KEY}", "???")
    assert config["actor_rollout_ref"]["rollout"]["n"] == 3


@pytest.mark.slow
def test_who_only_reads_a_run_needs_no_variable(lab, run, tmp_path, capsys):
    assert replay(Run(run), 2).equal
    assert main(["samples", str(run), "--n", "1"]) == 0
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    with Shelf([run]) as shelf:
        config = Api(shelf).routes["config"](Query(f"run={run}"))
    assert config["custom_reward_function.reward_kwargs.key"] == "${oc.env:CANARY_KEY}"
    assert Run(run).setting("trainer.seed") == 0
    with pytest.raises(ConfigError, match=r"trainer\.experiment_name[\s\S]*CANARY_NAME"):
        Run(run).setting("trainer.experiment_name")


def test_a_resumed_run_needs_them_and_may_have_another_key(run, request):
    """Values that were given directly must be given again."""
    config, words = str(run / "config.yaml"), ["trainer.total_training_steps=3", "trainer.logger=[]"]
    kwargs = "custom_reward_function.reward_kwargs"
    again = [*words, f"{kwargs}.password={LITERAL}"]

    def wrong(words: list[str]) -> set[str]:
        with pytest.raises(ConfigErrors) as errors:
            load_train_config(config, words)
        return {str(error.field) for error in errors.value.errors}

    assert wrong(again) >= {kwargs, "trainer.experiment_name"}
    request.getfixturevalue("canaries")
    assert wrong(words) == {f"{kwargs}.password"}
    run_ppo(load_train_config(config, again).config, say=[].append)
    assert Run(run).steps == 3
    assert held(run.parent) == {}


def test_a_run_that_fails_says_no_secret(lab, tmp_path, canaries, capfd):
    run = tmp_path / "run"
    fail = "custom_reward_function.reward_kwargs.fail=true"
    assert main(["train", *words_of(lab, run, fail)]) == 1
    said = "".join(capfd.readouterr())
    assert "401 for" in said and "${oc.env:CANARY_KEY}" in said
    assert [value for value in CANARIES.values() if value in said] == []
    assert held(tmp_path) == {}
