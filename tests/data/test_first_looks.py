"""Faults of a whole file are reported before missing columns."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.data.files import read_files
from tandem.data.formats import open_file
from tandem.errors import DataError

NEEDED = ("prompt", "data_source", "reward_model")


def written(folder: Path, table: pa.Table) -> str:
    path = folder / "rows.parquet"
    pq.write_table(table, path)
    return str(path)


@pytest.mark.parametrize(
    "table", [pa.table({}), pa.table({"prompt": pa.array([], pa.string())}), pa.table({"q": pa.array([])})]
)
def test_a_file_without_rows_is_empty_whatever_columns_it_has(tmp_path: Path, table: pa.Table) -> None:
    with pytest.raises(DataError, match="the data file is empty"):
        read_files(written(tmp_path, table), NEEDED)


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "q,a\n")])
def test_so_is_a_file_of_text(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="the data file is empty"):
        read_files(str(tmp_path / name), NEEDED)


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", "\n\n"), ("a.csv", "q,a\n")])
def test_so_it_is_where_the_rows_would_be_kept(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        open_file(tmp_path / name, tmp_path / "cache")
    assert (caught.value.field, caught.value.got) == (str(tmp_path / name), "0 rows")


def test_so_is_an_arrow_file_without_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(path, pa.schema({"prompt": pa.string()})):
        pass
    with pytest.raises(DataError) as caught:
        open_file(path, tmp_path / "cache")
    assert caught.value.got == "0 rows"


@pytest.mark.parametrize("values", [[1, 2], [0.5, 1.5]])
@pytest.mark.parametrize("alternatives", [(NEEDED,), (("messages",), ("prompt", "response"))])
def test_numbers_where_texts_are_needed_are_named(
    tmp_path: Path, values: list[float], alternatives: tuple[tuple[str, ...], ...]
) -> None:
    file = written(tmp_path, pa.table({"prompt": values}))
    with pytest.raises(DataError, match="the column 'prompt' holds numbers") as caught:
        read_files(file, *alternatives, keys=("data.prompt_key",))
    assert "data.prompt_key" in str(caught.value.remedy)
