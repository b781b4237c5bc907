import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.feather as pa_feather
import pyarrow.parquet as pq
import pytest

from tandem.config.data_files import files_of
from tandem.config.load import load_train_config
from tandem.data.files import count_rows, read_files
from tandem.data.formats import open_file
from tandem.errors import ConfigErrors, DataError
from tests.support.refusing import refused

ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(7) for b in range(3)]
TABLE = pa.Table.from_pylist(ROWS)


def arrow_stream(path):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=4)


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
WRITERS = {
    "a.parquet": lambda path: pq.write_table(TABLE, path), "a.jsonl": lambda path: path.write_text(LINES),
    "lines.json": lambda path: path.write_text(LINES),
    "list.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "a.csv": lambda path: pa_csv.write_csv(TABLE, path),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "list.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "a.feather": lambda path: pa_feather.write_feather(TABLE, str(path)), "a.arrow": arrow_stream,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_each_format(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    rows = [row | {"answer": str(row["answer"])} for row in ROWS] if name == "a.csv" else ROWS
    assert read_files(str(path), ("prompt",), optional=None).table.to_pylist() == rows
    assert count_rows([str(path)]) == len(ROWS)
    path.write_bytes(path.read_bytes()[:12])
    with pytest.raises(DataError, match=r"not a readable (parquet|Arrow|CSV|JSON(-lines)?) file"):
        read_files(str(path), ("prompt", "answer"), optional=None)


def test_a_folder_and_a_pattern_are_their_files_in_order(tmp_path):
    for name, write in WRITERS.items():
        write(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no data")
    every = sorted(str(tmp_path / name) for name in WRITERS)
    assert files_of(str(tmp_path)) == every
    assert files_of(str(tmp_path / "a.*")) == [file for file in every if "/a." in file]
    assert files_of(str(tmp_path / "a.csv")) == [str(tmp_path / "a.csv")]
    assert len(read_files(files_of(str(tmp_path)), ("prompt",))) == len(ROWS) * len(WRITERS)


def test_a_data_set_that_datasets_saved_and_a_pattern_without_files(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    saved = datasets.DatasetDict(train=rows, test=rows.select(range(5)))
    saved.save_to_disk(str(tmp_path), num_shards={"train": 2, "test": 1})
    files = files_of(str(tmp_path / "train"))
    assert len(files) == 2 and read_files(files, ("prompt",), optional=None).table.to_pylist() == ROWS
    for given, said in (("", f"{tmp_path}/train or {tmp_path}/test"), ("/*.parquet", "no data files found")):
        keys = ["actor_rollout_ref.model.path=/none", f"data.train_files={tmp_path}{given}"]
        assert said in str(refused(ConfigErrors, lambda keys=keys: load_train_config(None, keys)))


NEEDED = ("prompt", "data_source", "reward_model")
NO_BATCH = pa.BufferOutputStream()
pa.ipc.new_stream(NO_BATCH, pa.schema({"prompt": pa.string()})).close()


def parquet(table):
    file = pa.BufferOutputStream()
    pq.write_table(table, file)
    return bytes(file.getvalue())


@pytest.mark.parametrize(("name", "content"), [
    ("a.parquet", parquet(pa.table({}))),
    ("a.parquet", parquet(pa.table({"prompt": pa.array([], pa.string())}))),
    ("a.parquet", parquet(pa.table({"q": pa.array([])}))), ("a.jsonl", b""), ("a.jsonl", b"\n\n"),
    ("a.json", b"[]"), ("a.csv", b"q,a\n"), ("a.arrow", bytes(NO_BATCH.getvalue())),
])  # fmt: skip
def test_a_file_without_rows_is_empty_whatever_columns_it_has(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    error = refused(DataError, lambda: read_files(str(tmp_path / name), NEEDED))
    assert error.got == "0 rows"
    if name in ("a.jsonl", "a.csv", "a.arrow"):
        error = refused(DataError, lambda: open_file(tmp_path / name, tmp_path / "cache"))
        assert (error.field, error.got) == (str(tmp_path / name), "0 rows")


@pytest.mark.parametrize("values", [[1, 2], [0.5, 1.5]])
@pytest.mark.parametrize("alternatives", [(NEEDED,), (("messages",), ("prompt", "response"))])
def test_numbers_where_texts_are_needed_are_named(tmp_path, values, alternatives):
    (tmp_path / "a.parquet").write_bytes(parquet(pa.table({"prompt": values})))
    with pytest.raises(DataError, match="the column 'prompt' holds numbers") as caught:
        read_files(str(tmp_path / "a.parquet"), *alternatives, keys=("data.prompt_key",))
    assert "data.prompt_key" in str(caught.value.remedy)
