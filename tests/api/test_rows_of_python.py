import datasets
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.api.rows import data_files
from tandem.errors import DataError

ROWS = [{"prompt": "1+1=", "answer": "2", "n": 1}, {"prompt": "2+2=", "answer": "4", "n": 2}]


def read(files: list[str]) -> list[dict[str, object]]:
    (path,) = files
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize(
    "made",
    [
        ROWS,
        tuple(ROWS),
        pd.DataFrame(ROWS),
        pl.DataFrame(ROWS),
        pa.Table.from_pylist(ROWS),
        datasets.Dataset.from_list(ROWS),
    ],
    ids=["dicts", "tuple", "pandas", "polars", "pyarrow", "datasets"],
)
def test_every_kind_of_table_keeps_its_values(made, tmp_path):
    assert read(data_files(made, tmp_path, "train")) == ROWS


def test_a_selection_of_a_dataset_keeps_its_own_order(tmp_path):
    made = datasets.Dataset.from_list(ROWS).select([1, 0])
    assert read(data_files(made, tmp_path, "train")) == ROWS[::-1]


def test_rows_may_lack_columns(tmp_path):
    found = read(data_files([{"prompt": "a"}, {"prompt": "b", "hint": "x"}], tmp_path, "train"))
    assert found == [{"prompt": "a", "hint": None}, {"prompt": "b", "hint": "x"}]


def test_the_same_rows_go_to_the_same_file_and_others_to_another(tmp_path):
    first = data_files(ROWS, tmp_path, "train")
    assert data_files([dict(row) for row in ROWS], tmp_path, "train") == first
    assert data_files(ROWS[:1], tmp_path, "train") != first


def test_paths_are_taken_as_they_are(tmp_path):
    assert data_files("a.parquet", tmp_path, "train") == ["a.parquet"]
    assert data_files([tmp_path / "a", "b"], tmp_path, "train") == [str(tmp_path / "a"), "b"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        (7, r"got: +int"),
        ([1, 2], r"got: +list"),
        ([{"answer": 1}, {"answer": "two"}], "column 'answer'"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "one of its splits: train"),
    ],
)
def test_what_is_no_table_is_refused_by_name(rows, words, tmp_path):
    with pytest.raises(DataError, match=words):
        data_files(rows, tmp_path, "train")
