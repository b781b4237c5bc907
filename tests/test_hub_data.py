from pathlib import Path

import huggingface_hub
import pytest

from tandem import hub
from tandem.config.load import load_train_config
from tandem.data.files import read_files
from tandem.errors import ConfigErrors
from tests.support.tiny import make_tokenizer, write_rows
from tests.support.words import words as full_words

REVISION = "b" * 40


def rows(first: int, number: int) -> list[dict[str, str]]:
    return [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(first, first + number)]


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """Return a dataset in the cache with two folders; the first one's training rows are in two files."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = cache / "datasets--openai--gsm8k"
    folder = repository / "snapshots" / REVISION
    for part in ("main", "socratic"):
        (folder / part).mkdir(parents=True)
    write_rows(folder / "main" / "train-00000-of-00002.parquet", rows(0, 3))
    write_rows(folder / "main" / "train-00001-of-00002.parquet", rows(3, 2))
    write_rows(folder / "main" / "test-00000-of-00001.parquet", rows(5, 1))
    write_rows(folder / "socratic" / "train-00000-of-00001.parquet", rows(9, 1))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return folder


def words(folder: Path, files: str) -> list[str]:
    make_tokenizer(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 50}')
    usual = "algorithm.adv_estimator=grpo R.n=2 data.train_batch_size=2"
    return full_words(f"M.path={folder / 'model'} data.train_files={files}", usual)


def refusal(folder: Path, files: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        load_train_config(None, words(folder, files))
    return str(caught.value)


def test_its_rows_are_the_data(snapshot, tmp_path):
    held_out = "data.val_files=hf:openai/gsm8k?split=test"
    loaded = load_train_config(None, [*words(tmp_path, "hf:openai/gsm8k?name=main"), held_out])
    data = loaded.config.data
    assert [row for _, row in read_files(data.train_files, ["question", "answer"]).records()] == rows(0, 5)
    assert [row for _, row in read_files(data.val_files, ["question", "answer"]).records()] == rows(5, 1)
    assert any(str(snapshot) in said for said in loaded.messages)


def test_several_folders_are_named(snapshot, tmp_path):
    assert "expected: name=main or name=socratic" in refusal(tmp_path, "hf:openai/gsm8k")


@pytest.mark.parametrize("files", ["hf:openai/other", "hf:openai/gsm8k?split=dev"])
def test_what_is_not_there_offline_is_an_error_with_what_to_do(snapshot, tmp_path, files):
    told = refusal(tmp_path, files)
    assert "data.train_files: the hub has no dataset" in told
    assert str(tmp_path / "cache") in told
    assert f"`hf download --repo-type dataset {files[3:].partition('?')[0]}`" in told and "HF_HOME" in told


def test_half_a_split_in_the_cache_is_not_taken_for_the_whole(snapshot, tmp_path):
    (snapshot / "main" / "train-00001-of-00002.parquet").unlink()
    assert "the hub has no dataset" in refusal(tmp_path, "hf:openai/gsm8k?name=main")


def test_what_is_no_name_of_a_data_set_is_refused(tmp_path):
    assert "hf:OWNER/NAME?split=train&name=FOLDER" in refusal(tmp_path, "hf:gsm8k")
    assert "hf:OWNER/NAME?split=train&name=FOLDER" in refusal(tmp_path, "hf:openai/gsm8k?splt=test")


def test_a_path_that_is_not_there_is_no_such_file(tmp_path):
    told = refusal(tmp_path, "data/train.parquet")
    assert "data.train_files: this file does not exist" in told and "hub" not in told.replace("hf:", "")
    assert "hf:openai/gsm8k" in refusal(tmp_path, "openai/gsm8k")
    assert hub.data_files("a.parquet") == ["a.parquet"]
