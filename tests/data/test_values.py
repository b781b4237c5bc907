import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.data import files
from tandem.data.files import read_files
from tandem.errors import DataError

FIELDS = (
    "007", "1e5", "1.10", "-0", "+5", "12345678901234567890", "0.1000000000000000055", "1e400", " 7", "",
)  # fmt: skip
FIELDS += (
    "2024-05-01", "2024-05-01T00:00:00Z", "12:30:00", "true", "null", "NA", "nan", "inf", "0x1F", "1,000",
)  # fmt: skip
KEPT = ("12", "-9223372036854775808", "9223372036854775807", "0.1", "1e5", "-0.0", "5e-324", "true", "null")
KEPT += ('"2024-05-01"', '"2024-05-01T00:00:00Z"', '"12:30:00"', '"007"', '"1e5"', '"NA"', "Infinity", "{}")
KEPT += ('["2024-05-01"]', '{"a": ["2024-05-01 12:00:00"]}', '[{"b": 1.5}]', "0.30000000000000004")
REFUSED = (
    "9223372036854775808", "18446744073709551616", "1" * 5000, "0.1000000000000000055", "1e400", "1e-400",
)  # fmt: skip
REFUSED += ("1e999999999999999999999", "123456789.123456789123")
MIXED = (("1", "1.5"), ("9007199254740993", "0.5"), ("true", "1"), ("1", '"1"'), ("[1]", "[1.5]"))


@pytest.fixture(params=[False, True], ids=["memory", "cache"])
def cache(request, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "IN_MEMORY_BYTES", 0)
    return str(tmp_path / "cache") if request.param else None


def answers(path, cache):
    table = read_files(str(path), ("prompt",), optional=None, cache_dir=cache).table
    return [row["answer"] for row in table.to_pylist()]


def json_files(folder, values):
    rows = [f'{{"prompt": "x", "answer": {value}}}' for value in values]
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "a.json").write_text(f"[{', '.join(rows)}]")
    return [folder / "a.jsonl", folder / "a.json"]


def test_a_field_of_csv_is_the_text_that_stands_there(tmp_path, cache):
    fields = [*FIELDS, "several words"]
    (tmp_path / "a.csv").write_text("prompt,answer\n" + "".join(f'x,"{field}"\n' for field in fields))
    assert answers(tmp_path / "a.csv", cache) == fields
    for field in FIELDS:
        (tmp_path / "a.csv").write_text(f'prompt,answer\nx,"{field}"\n')
        assert answers(tmp_path / "a.csv", cache) == [field]


def test_a_value_of_json_is_what_python_reads(tmp_path, cache):
    for value in KEPT:
        for path in json_files(tmp_path, (value,)):
            (found,) = answers(path, cache)
            assert repr(found) == repr(json.loads(value)), (path, value)


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: value[:24])
def test_a_number_that_a_table_would_change_is_refused(tmp_path, cache, value):
    for path in json_files(tmp_path, ("0.5" if "." in value else "1", value)):
        with pytest.raises(DataError, match="not a readable JSON") as caught:
            answers(path, cache)
        assert "row 1" in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("values", MIXED, ids=str)
def test_kinds_are_not_mixed(tmp_path, cache, values):
    for path in json_files(tmp_path, values):
        with pytest.raises(DataError, match="row 1"):
            answers(path, cache)
    for name, value in zip("ab", values, strict=True):
        table = pa.Table.from_pylist([{"prompt": "x", "answer": json.loads(value)}])
        pq.write_table(table, tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match="different types in one column"):
        read_files([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")], ("answer",), cache_dir=cache)


@pytest.mark.parametrize("values", [(1.5, 1), (1, 1.5)])
def test_whole_numbers_in_a_later_block_stay_apart_from_others(tmp_path, monkeypatch, values):
    blocks = ["".join(json.dumps({"a": value + n}) + "\n" for n in range(50)) for value in values]
    (tmp_path / "a.jsonl").write_text("".join(blocks), encoding="utf-8")
    monkeypatch.setattr("tandem.data.formats.BLOCK_BYTES", len(blocks[0]) - 3)
    monkeypatch.setattr("tandem.data.files.IN_MEMORY_BYTES", 1)
    with pytest.raises(DataError, match="a: "):
        read_files(str(tmp_path / "a.jsonl"), ("a",), cache_dir=str(tmp_path / "cache"))
