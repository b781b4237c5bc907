"""What is written of a config: every key with its value, except values from the environment and secrets."""

import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from tandem.config.load import load_train_config
from tandem.config.resume import Change, changes, check_same
from tandem.config.root import TrainConfig
from tandem.config.sources import to_yaml
from tandem.config.written import LEFT_OUT, at_key, remade, resolved, to_dict, tracked_name
from tandem.errors import ConfigError, ConfigErrors, DataError
from tandem.hidden import hide, masked
from tandem.observability.lock import ProcessLock

SECRET = "canary-of-the-config"
KWARGS = "custom_reward_function.reward_kwargs"


@pytest.fixture
def words(tmp_path: Path, required: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "score.py").touch()
    for name, value in {"SECRET": SECRET, "SHORT": "k7", "COUNT": "3", "BELOW": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return [*required, f"custom_reward_function.path={tmp_path}/score.py", "algorithm.adv_estimator=grpo"]


def _config(words: list[str], *more: str) -> TrainConfig:
    return load_train_config(None, [*words, *more]).config


@pytest.mark.parametrize(
    ("given", "key", "value", "written"),
    [
        ("trainer.experiment_name=${oc.env:SECRET}", "trainer.experiment_name", SECRET, None),
        ("trainer.experiment_name=a-${oc.env:SHORT}-b", "trainer.experiment_name", "a-k7-b", None),
        ("trainer.experiment_name=${oc.env:NO,${oc.env:SHORT}}", "trainer.experiment_name", "k7", None),
        ("trainer.seed=${oc.decode:${oc.env:COUNT}}", "trainer.seed", 3, None),
        (KWARGS + ".key=[{a: '${oc.env:SHORT}'}]", KWARGS, {"key": [{"a": "k7"}]},
         {"key": [{"a": "${oc.env:SHORT}"}]}),
        ("trainer.project_name=${oc.env:SHORT}", "trainer.default_local_dir", "runs/k7/default",
         "runs/${trainer.project_name}/${trainer.experiment_name}"),
        ("data.train_batch_size=${oc.decode:${oc.env:COUNT}}", "actor_rollout_ref.actor.ppo_mini_batch_size",
         3, "${data.train_batch_size}"),
        ("actor_rollout_ref.actor.grad_clip=${oc.decode:${oc.env:COUNT}}",
         "actor_rollout_ref.actor.optim.clip_grad", 3, "${oc.decode:${oc.env:COUNT}}"),
        ("data.train_files=['${oc.env:BELOW}/*.parquet']", "data.train_files", None,
         ["${oc.env:BELOW}/*.parquet"]),
    ],
)  # fmt: skip
def test_a_value_from_the_environment_stays_a_reference(words, tmp_path, given, key, value, written):
    config = _config(words, given)
    found = at_key(config.model_dump(), key)
    assert value is None or found == value
    tree = to_dict(config)
    assert at_key(tree, key) == (given.partition("=")[2] if written is None else written)
    (tmp_path / "again.yaml").write_text(to_yaml(tree))
    again = load_train_config(str(tmp_path / "again.yaml")).config
    assert at_key(again.model_dump(), key) == found
    assert to_dict(again) == to_dict(pickle.loads(pickle.dumps(config))) == tree


def test_a_value_by_way_of_another_key(words):
    keys = ["trainer.project_name=${oc.env:SECRET}", KWARGS + ".key=${trainer.project_name}"]
    config = _config(words, *keys, "trainer.experiment_name=x${oc.select:trainer.project_name}")
    assert config.trainer.experiment_name == "x" + SECRET
    assert config.custom_reward_function.reward_kwargs == {"key": SECRET}
    for written in (config, remade(config, config.model_dump() | {})):
        assert SECRET not in str(to_dict(written))


@pytest.mark.parametrize("name", ["api_key", "OPENAI_API_KEY", "password", "hf_token", "secret"])
def test_a_secret_that_is_given_as_it_is_is_left_out_and_must_be_given_again(words, tmp_path, name):
    config = _config(words, f"{KWARGS}.{name}=sk-given-as-it-is", KWARGS + ".url=https://me:pass@host/v1")
    tree = to_dict(config)
    assert at_key(tree, KWARGS) == {name: LEFT_OUT, "url": LEFT_OUT}
    assert masked("401: sk-given-as-it-is") == f"401: {LEFT_OUT}"
    (tmp_path / "again.yaml").write_text(to_yaml(tree))
    with pytest.raises(ConfigErrors) as errors:
        load_train_config(str(tmp_path / "again.yaml"))
    assert [error.field for error in errors.value.errors] == [f"{KWARGS}.{name}", f"{KWARGS}.url"]
    assert changes(tree, config) == []


def test_secrets_in_a_list_are_left_out(words):
    config = _config(words, KWARGS + ".api_key=[sk-the-first-of-two, {a: plain}]")
    assert at_key(to_dict(config), KWARGS) == {"api_key": [LEFT_OUT, {"a": "plain"}]}


@pytest.mark.parametrize(
    "given",
    ["algorithm.adv_estimator=${oc.env:SHORT}", "trainer.seed=${oc.env:SHORT}", 
     "trainer.logger=['${oc.env:SHORT}']", "trainer.resume_mode=${oc.env:SHORT}"],
)  # fmt: skip
def test_an_error_shows_the_reference_however_short_the_value(words, given):
    with pytest.raises(ConfigErrors) as errors:
        _config(words, given)
    (error,) = errors.value.errors
    assert error.field == given.partition("=")[0] and "${oc.env:SHORT}" in str(error.got)


def test_an_error_of_a_rule_shows_no_value_in_any_of_its_parts(words):
    with pytest.raises(ConfigErrors) as errors:
        _config(words, "trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/${oc.env:SECRET}")
    assert SECRET not in str(errors.value)


def test_a_variable_that_is_not_set_is_an_error_of_the_key_that_names_it():
    tree = {"a": "${oc.env:TANDEM_NOT_THERE}", "b": 1, "c": {"d": "${b}", "e": "${a}"}}
    assert (resolved(tree, "b"), resolved(tree, "c.d"), resolved(tree, "c.x")) == (1, 1, None)
    for name in ("a", "c.e", "c"):
        with pytest.raises(ConfigError, match="TANDEM_NOT_THERE") as error:
            resolved(tree, name)
        assert error.value.field == name


def _folder(tmp_path: Path, tree: dict[str, Any]) -> Path:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(tree))
    return tmp_path / "run" / "checkpoints" / "step_000001"


def test_a_folder_that_has_the_value_goes_on_under_the_reference(words, tmp_path):
    """A run folder of an earlier version contains the value; a changed value is detected but not shown."""
    then = _config(words, f"{KWARGS}.api_key={SECRET}").model_dump(mode="json")
    now = _config(words, KWARGS + ".api_key=${oc.env:SECRET}")
    assert changes(then, now) == []
    then["custom_reward_function"]["reward_kwargs"]["api_key"] = "sk-the-key-of-before"
    (change,) = changes(then, now)
    assert change == Change(KWARGS, '{"api_key": "???"}', '{"api_key": "${oc.env:SECRET}"}')
    assert changes(to_dict(now), _config(words, f"{KWARGS}.api_key={SECRET}")) == []
    assert len(changes(to_dict(now), _config(words, KWARGS + ".api_key=${oc.env:SHORT}"))) == 1


def test_who_resumes_is_told_what_cannot_be_compared(words, tmp_path):
    config = _config(
        words, "data.train_batch_size=${oc.decode:${oc.env:COUNT}}", "trainer.project_name=${oc.env:SHORT}"
    )
    said: list[str] = []
    check_same(_folder(tmp_path, to_dict(config)), config, allowed=False, say=said.append)
    assert len(said) == 1 and "data.train_batch_size" in said[0] and "project_name" not in said[0]


def test_tracked_names():
    names = {"run-${oc.env:A}-x": "run-A-x", "${oc.decode:${oc.env:N}}": "N", "${a.b}": "a.b"}
    assert {written: tracked_name("value", written) for written in names} == names
    assert tracked_name("a-$b", "a-$b") == "a-$b"


def test_texts_are_masked_in_the_forms_that_a_value_takes():
    hide("multi\nline 'secret'", "<mark>")
    hide("short", "<mark>")
    for text in ("multi\nline 'secret'", repr("multi\nline 'secret'"), '{"a": "multi\\nline \'secret\'"}'):
        assert "secret" not in masked(text) and "<mark>" in masked(text)
    assert masked("short") == "short"
    assert "line" not in str(DataError("no", got="multi\nline 'secret'"))


def test_of_a_hidden_value_within_another_nothing_is_left():
    hide("hidden-inside", "<inner>")
    hide("before-hidden-inside-after", "<outer>")
    assert masked("a before-hidden-inside-after b hidden-inside c") == "a <outer> b <inner> c"


@pytest.mark.parametrize(("mode", "expected"), [(0o700, 0o700), (0o777, 0o755)])
def test_a_run_folder_is_made_for_its_user_alone_unless_asked_otherwise(tmp_path, mode, expected):
    before = os.umask(0o022)
    try:
        with ProcessLock(tmp_path / "a" / "run" / "run.lock", "field", print, folder_mode=mode):
            assert stat.S_IMODE((tmp_path / "a" / "run").stat().st_mode) == expected
            assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755
    finally:
        os.umask(before)
