"""Hydra's command lines and config files, read without Hydra."""

from pathlib import Path
from typing import Any

import pytest

from tandem.config.flow import read_flow
from tandem.config.hydra import VERLS_DEFAULTS
from tandem.config.load import load_train_config
from tandem.config.sources import read_sources, split_arguments
from tandem.errors import ConfigError, ConfigErrors


def read(*overrides: str, path: Path | None = None) -> dict[str, Any]:
    tree, errors, *_ = read_sources(None if path is None else str(path), overrides)
    assert errors == []
    return tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("[a,b]", ["a", "b"]), ("{a:1}", {"a": 1})),
        ("{a: 1, b: [x y, 'q, r', \"z\"]}", {"a": 1, "b": ["x y", "q, r", "z"]}),
        *(("[]", []), ("{}", {}), ("[a\\,b]", ["a,b"]), ("[[8,8],{a:{b:c}}]", [[8, 8], {"a": {"b": "c"}}])),
        ("[1e-3,.5,True,NULL,1_000,-2,1.]", [0.001, 0.5, True, None, 1000, -2, 1.0]),
        ("['$HOME/x y.parquet',\"it's\",'it\\'s']", ["$HOME/x y.parquet", "it's", "it's"]),
        ("[${a.b},/x/y:z]", ["${a.b}", "/x/y:z"]),
        ("{path:/x/y,u:http://a.b:80/c}", {"path": "/x/y", "u": "http://a.b:80/c"}),
    ],
)
def test_lists_and_mappings(text, value):
    assert read_flow(text) == value
    spaced = text.replace("[", "[ ").replace("]", " ]") if "'" not in text else text
    assert read_flow(spaced) == value


@pytest.mark.parametrize("text", ["a", "[a,,b]", "{a}", "[", "{a:1", "[a]b", "['a]", "[a: b]", ""])
def test_neither_list_nor_mapping(text):
    with pytest.raises(ValueError, match="not a value at character"):
        read_flow(text)


def test_overrides_as_hydra_writes_them():
    given = ("+a.b={x:1,y:[p,q]}", "++a.c=[m,n]", "a.d={z: null}", "a.e='k,l'", "a.f=1e-6", "~a.c")
    tree = read(*given, "hydra.run.dir=x")
    assert tree == {"a": {"b": {"x": 1, "y": ["p", "q"]}, "d": {"z": None}, "e": "k,l", "f": 1e-6}}


def test_a_key_that_is_taken_back_has_its_default(load):
    loaded = load("trainer.seed=3", "trainer.total_epochs=7", "~trainer.seed", "~trainer.nnodes=1", "~critic")
    assert (loaded.config.trainer.seed, loaded.config.trainer.total_epochs) == (0, 7)


@pytest.mark.parametrize(
    "form", [["--config-path={}", "--config-name=mine"], ["-cp", "{}", "-cn", "mine.yaml"]]
)
def test_options_name_the_file(tmp_path, form):
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    words = [word.format(tmp_path) for word in form]
    assert split_arguments(["x=1", *words, "y=2"]) == (str(tmp_path / "mine.yaml"), ["x=1", "y=2"])


def test_verls_own_sets_are_names(tmp_path):
    assert split_arguments(["--config-name=ppo_trainer.yaml", "x=1"]) == (None, [*VERLS_DEFAULTS, "x=1"])
    assert split_arguments(["--config-path=./config", "--config-name", "ppo_megatron_trainer"]) == (
        None,
        [*VERLS_DEFAULTS, "model_engine=megatron"],
    )
    with pytest.raises(ConfigError, match="config file does not exist") as caught:
        split_arguments([f"--config-path={tmp_path}", "--config-name=mine"])
    assert str(tmp_path / "mine.yaml") in str(caught.value.expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--config-name", "needs a value"), ("--multirun a=1,2", "not supported"),
        ("--cfg job", "not supported"), ("--other", "unknown option"),
        ("a.yaml b.yaml", "nor the first config file"), ("run.yaml a=1 other.yaml", "neither an override"),
    ],
)  # fmt: skip
def test_options_that_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        split_arguments(words.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of config files that refer to each other."""
    files = {
        "mine.yaml": "defaults:\n  - base\n  - algo: grpo\n  - /algo@trainer: named\n  - optional absent\n"
        "  - override algo: rloo\n  - _self_\nhydra: {run: {dir: x}}\ntrainer: {seed: 5}\nlist: [3]\n",
        "base.yaml": "trainer: {seed: 1, nnodes: 2}\nlist: [1, 2]\n",
        "late.yaml": "defaults:\n  - _self_\n  - base\ntrainer: {seed: 5, total_epochs: 4}\n",
        "plain.yaml": "defaults:\n  - base\ntrainer: {seed: 6}\n",
        "algo/grpo.yaml": "name: grpo\n",
        "algo/rloo.yaml": "# @package _global_\ndefaults:\n  - deep\nalgorithm: {name: rloo}\n",
        "algo/deep.yaml": "depth: 2\n",
        "algo/named.yaml": "project_name: p\n",
        "loop.yaml": "defaults:\n  - loop\n",
        "missing.yaml": "defaults:\n  - algo: nowhere\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_are_put_together_in_the_order_of_their_defaults(folder):
    assert read("trainer.nnodes=9", path=folder / "mine.yaml") == {
        "trainer": {"seed": 5, "nnodes": 9, "project_name": "p"},
        "list": [3],
        "algorithm": {"name": "rloo"},
        "depth": 2,
    }
    assert read(path=folder / "late.yaml")["trainer"] == {"seed": 1, "total_epochs": 4, "nnodes": 2}
    assert read(path=folder / "plain.yaml")["trainer"] == {"seed": 6, "nnodes": 2}


def test_the_command_line_chooses_the_file_of_a_group(folder):
    tree = read("algo=grpo", path=folder / "mine.yaml")
    assert tree["algo"] == {"name": "grpo"}
    assert "algorithm" not in tree


@pytest.mark.parametrize(("name", "message"), [("loop", "includes itself"), ("missing", "algo/nowhere")])
def test_defaults_that_cannot_be(folder, name, message):
    (error,) = read_sources(str(folder / f"{name}.yaml"), [])[1]
    assert message in str(error)


def test_verls_own_files_among_the_defaults_stand_for_verls_defaults(tmp_path):
    file = tmp_path / "multiturn.yaml"
    file.write_text(
        "hydra:\n  searchpath:\n    - file://verl/trainer/config\ndefaults:\n  - ppo_megatron_trainer\n"
        "  - actor@actor_rollout_ref.actor: ${model_engine}_actor\n  - _self_\ntrainer: {seed: 5}\n"
    )
    tree = read("trainer.nnodes=2", path=file)
    assert tree.pop("model_engine") == "megatron"
    verls = {key.split(".")[1]: value for key, _, value in (text.partition("=") for text in VERLS_DEFAULTS)}
    assert tree == {"trainer": {**verls, "seed": 5, "nnodes": 2}}


def test_interpolations_name_given_keys_the_environment_or_defaults(required, monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_TEST_NAME", "n")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "data:\n  max_prompt_length: 100\n  max_response_length: ${data.max_prompt_length}\n"
        "trainer:\n  experiment_name: ${oc.env:TANDEM_TEST_NAME}\n"
        "  save_freq: ${oc.select:trainer.test_freq,3}\n"
        "  total_epochs: ${oc.select:trainer.nothing,4}\n  project_name: ${data.prompt_key}\n"
    )
    config = load_train_config(str(file), [*required, "data.max_prompt_length=200"]).config
    assert config.data.max_response_length == 200
    assert config.trainer.experiment_name == "n"
    assert (config.trainer.save_freq, config.trainer.total_epochs) == (-1, 4)
    assert config.trainer.project_name == "prompt"
    with pytest.raises(ConfigErrors, match=r"oc.env|TANDEM_NOT_THERE"):
        load_train_config(str(file), [*required, "trainer.seed=${oc.env:TANDEM_NOT_THERE}"])
