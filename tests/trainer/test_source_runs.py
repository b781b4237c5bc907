import pytest

from tandem.errors import RewardError
from tandem.sandbox import local, protections
from tests.support.tiny import problem, write_rows


def rows(folder, source, truth):
    """Write a file of sums whose rows have the data source and the ground truth."""
    reward_model = {"style": "rule", "ground_truth": truth}
    made = [problem(1, b) | {"data_source": source, "reward_model": reward_model} for b in range(2, 10)]
    return write_rows(folder / f"{source}.parquet", made)


@pytest.mark.parametrize(
    ("source", "truth", "wrong"),
    [("math_dapo", "34", -1), ("searchR1_nq", {"target": ["Paris", "Lutetia"]}, 0)],
)
def test_rows_train_as_they_are(lab, tmp_path, source, truth, wrong):
    data = rows(tmp_path, source, truth)
    finished = lab.run(source, f"data.train_files={data} steps=1")
    assert finished.rows[0]["reward/mean"] == wrong  # no untrained model answers in the required form


def test_programs_train_in_a_sandbox_which_is_said(lab, tmp_path):
    data = rows(tmp_path, "codeforces", '{"inputs": ["1"], "outputs": ["1"]}')
    finished = lab.run("codeforces", f"data.train_files={data} steps=1")
    assert finished.rows[0]["reward/extra/tests"] == 1
    assert sum("programs that answer codeforces run here, under " in said for said in finished.said) == 1


def test_programs_are_refused_before_any_step_without_a_sandbox(lab, tmp_path, monkeypatch):
    for kind in (protections.Sandlock, protections.Bubblewrap):
        monkeypatch.setattr(kind, "version", lambda: None)
    local._working_sandbox.cache_clear()
    data = rows(tmp_path, "apps", '{"inputs": ["1"], "outputs": ["1"]}')
    with pytest.raises(RewardError, match="sandlock is not installed; bubblewrap is not installed"):
        lab.trainer(tmp_path / "run", f"data.train_files={data}")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
