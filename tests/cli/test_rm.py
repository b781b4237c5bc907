"""`tandem rm`: from a file of preferences to a reward model that other programs load."""

import functools
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tandem.cli.main import main
from tandem.config.rewards import RewardBackboneConfig, RewardModelConfig
from tandem.data.preferences import PreferenceDataset
from tandem.observability.run import RunFolder, read_metrics
from tandem.offline.export import export_checkpoint
from tandem.protocol import DataProto
from tandem.runtime.worker import create
from tandem.workers.reward_model import RewardModelWorker
from tests.support.school import School
from tests.support.tiny import write_rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_model"


@pytest.fixture(scope="module")
def trained(school: School) -> tuple[School, Path]:
    words = school.words("rm", "trained", "trainer.save_freq=6")
    assert main(["rm", *words]) == 0
    assert main(["export", str(school.folder / "trained"), str(school.folder / "exported")]) == 0
    return school, school.folder / "exported"


def test_the_reward_model_role_scores_as_training_did(trained, tmp_path):
    """The mean rewards of validation answers equal those that the run's last validation reported."""
    school, folder = trained
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = PreferenceDataset(str(school.files["rm"][1]), tokenizer)
    config = RewardModelConfig(enable=True, model=RewardBackboneConfig(path=str(folder)))
    settings = {"tokenizer": tokenizer, "device": "cpu", "collective_timeout_s": 60}
    build = functools.partial(RewardModelWorker, config, **settings, run=RunFolder(tmp_path))
    worker = create(build, 0, 1)
    row = read_metrics(school.folder / "trained" / "metrics.jsonl")[-1]
    for side, mask, name in (
        (data.chosen, data.chosen_mask, "val/reward_chosen"),
        (data.rejected, data.rejected_mask, "val/reward_rejected"),
    ):
        batch = DataProto({"tokens": side.to(torch.int64), "response_mask": mask})
        scores = worker.compute_rm_score(batch).dense("scores")
        assert float(scores.double().mean()) == pytest.approx(row[name], rel=1e-5, abs=1e-6)


def test_transformers_scores_a_padded_batch_alike(trained):
    school, folder = trained
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(model).__name__ == "Qwen2ForSequenceClassification"
    assert model.config.num_labels == 1 and model.config.pad_token_id == 0
    data = PreferenceDataset(str(school.files["rm"][1]), AutoTokenizer.from_pretrained(folder))
    lengths = data.chosen.lengths
    padded = data.chosen.to_padded(0).long()
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    scores = model(input_ids=padded, attention_mask=mask).logits[:, 0]
    row = read_metrics(school.folder / "trained" / "metrics.jsonl")[-1]
    assert float(scores.detach().mean()) == pytest.approx(row["val/reward_chosen"], rel=1e-4, abs=1e-5)


def test_the_exported_folder_is_where_another_run_may_start(trained):
    school, folder = trained
    again = school.run("rm", "again", f"model.path={folder}", "optim.lr=0", "trainer.total_training_steps=1")
    last = read_metrics(school.folder / "trained" / "metrics.jsonl")[-1]
    for name in ("val/loss", "val/accuracy", "val/margin"):
        assert again.rows[-1][name] == pytest.approx(last[name], rel=1e-5)
    assert not any("score head" in sentence for sentence in again.said)


def test_where_padding_is_the_end_of_sequence_none_is_named(school):
    """Otherwise transformers would take the score before the end-of-sequence token."""
    tokenizer = AutoTokenizer.from_pretrained(school.model)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(school.folder / "same_tokens")
    words = (f"model.tokenizer_path={school.folder / 'same_tokens'}", "trainer.save_freq=1")
    run = school.run("rm", "same_tokens_run", *words, "trainer.total_training_steps=1")
    out = export_checkpoint(run.folder, school.folder / "same_tokens_exported")
    assert AutoModelForSequenceClassification.from_pretrained(out).config.pad_token_id is None


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_example_learns_what_is_preferred_and_from_coin_tosses_nothing(tmp_path, monkeypatch, capsys):
    """This is what its README says, with fewer steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE)
    import_module("make_preferences").write(Path("preferences"))
    words = ["trainer.total_training_steps=12", "trainer.test_freq=12", "trainer.logger=[]"]
    assert main(["rm", str(EXAMPLE / "rm.yaml"), *words]) == 0
    assert "its score head is new" in capsys.readouterr().out
    last = read_metrics(Path("runs/preferences/metrics.jsonl"))[-1]
    assert last["val/accuracy"] > 0.9 and last["val/loss"] < 0.4
    pairs = pq.read_table("preferences/train.parquet").to_pylist()
    draw = np.random.default_rng(0)
    for pair in pairs:
        if draw.random() < 0.5:
            pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
    write_rows(tmp_path / "tossed.parquet", pairs)
    words += ["data.train_files=tossed.parquet", "trainer.default_local_dir=runs/tossed"]
    assert main(["rm", str(EXAMPLE / "rm.yaml"), *words]) == 0
    last = read_metrics(Path("runs/tossed/metrics.jsonl"))[-1]
    assert last["val/accuracy"] < 0.9 and last["val/loss"] > 0.6


def test_what_is_wrong_is_said_before_anything_is_made(school, tmp_path, refused):
    words = school.words("rm", "unmade", f"trainer.default_local_dir={tmp_path / 'run'}")
    said = refused("rm", *words, "max_token_len_per_gpu=95", "data.chosen=x")
    assert "data.chosen: unknown key" in said and "data.chosen_key" in said
    assert "at least 96 tokens (data.max_length + data.max_length)" in said
    assert "missing column 'better'" in refused("rm", *words, "data.chosen_key=better")
    assert not (tmp_path / "run").exists()


def test_dry_run_check_and_config_know_the_command(school, printed):
    words = school.words("rm", "unmade")
    assert "center_rewards_coefficient: 0.0" in printed("rm", *words, "--dry-run")
    assert "the config is sound" in printed("check", *words, "--rm")
    assert "data.margin_key: null" in printed("config", "show", "--rm")
    assert "(tandem rm)" in printed("config", "explain", "center_rewards_coefficient")
