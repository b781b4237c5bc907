from pathlib import Path

import huggingface_hub
import pytest

from tandem import hub
from tandem.cli.main import main
from tandem.config.load import load_train_config
from tandem.errors import ConfigErrors, TandemError
from tests.support.tiny import make_model, write_problems
from tests.support.words import words as full_words

REVISION = "a" * 40


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    repository = cache / "models--tiny--model"
    make_model(repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    hub.find.cache_clear()
    return repository / "snapshots" / REVISION


def words(folder: Path, model: str) -> list[str]:
    train, _ = write_problems(folder)
    return full_words(
        f"M.path={model} data.train_files={train} algorithm.adv_estimator=grpo R.n=2 steps=1",
        f"data.train_batch_size=4 data.max_response_length=4 trainer.default_local_dir={folder / 'run'}",
    )


def test_a_run_with_a_cached_model(snapshot, tmp_path, capsys):
    assert main(["train", *words(tmp_path, "tiny/model")]) == 0
    assert f"note: actor_rollout_ref.model.path is {snapshot}" in capsys.readouterr().err
    assert str(snapshot) in (tmp_path / "run" / "config.yaml").read_text()


def test_a_folder_of_that_name_comes_first(snapshot, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "tiny" / "model")
    config = load_train_config(None, words(tmp_path, "tiny/model")).config
    assert config.actor_rollout_ref.model.path == "tiny/model"


def test_a_name_that_cannot_be_had_is_an_error_with_what_to_do(snapshot, tmp_path):
    with pytest.raises(ConfigErrors) as caught:
        load_train_config(None, words(tmp_path, "tiny/other"))
    told = str(caught.value)
    assert (
        "actor_rollout_ref.model.path: this folder does not exist, and the hub has no model of that name"
        in told
    )
    assert "`hf download tiny/other` where there is a network" in told


def test_a_snapshot_without_weights_gets_them_or_the_run_is_refused(snapshot, monkeypatch):
    hub.fetch_weights(str(snapshot))  # the cache has them
    weights = (snapshot / "model.safetensors").read_bytes()
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(TandemError, match=r"tiny/model: .*weights are not in the cache"):
        hub.fetch_weights(str(snapshot))

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert (name, revision, allow_patterns) == ("tiny/model", REVISION, ["*.safetensors"])
        (snapshot / "model.safetensors").write_bytes(weights)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.fetch_weights(str(snapshot))
    assert (snapshot / "model.safetensors").read_bytes() == weights


def test_what_can_be_a_name():
    paths = ("Qwen/Qwen3-8B", "./a/b", "/a/b", "a", "a/b/c", "a/b/")
    assert [path for path in paths if hub.is_name(path)] == ["Qwen/Qwen3-8B"]
