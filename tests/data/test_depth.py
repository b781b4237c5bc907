import gzip
import io
import json
import random

import pytest

from tandem.data import depth
from tandem.data.depth import DEEPEST, Shallow
from tandem.data.files import read_files
from tandem.data.lines import scan
from tandem.errors import DataError

SLACK = 4
DEEP = {
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "within a row": b'{"prompt": "x", "extra": ' + b"[1," * 100_000 + b"}",
    "beside empty lists": b'{"prompt": ' + b"[[],{}," * 100_000,
    "behind brackets in strings": b'{"prompt": ' + b'["]]]}}", ' * 100_000,
    "over several lines": b"[\n" * 5_000,
}


def deepest(text):
    """Return the depth, computed in the slow and obvious way."""
    level = found = at = 0
    inside = False
    while at < len(text):
        mark = text[at : at + 1]
        if inside:
            at += mark == b"\\"
            inside = mark != b'"'
        elif mark == b'"':
            inside = True
        else:
            level += (mark in b"[{") - (mark in b"]}")
        found = max(found, level)
        at += 1
    return found


def test_the_depth_is_that_of_the_slow_way(monkeypatch):
    draw = random.Random(0)
    for piece in (3, 7, 1 << 18):  # strings and escapes cross pieces
        monkeypatch.setattr(depth, "_PIECE", piece)
        for _ in range(60):
            texts = ["".join(draw.choices('[]{}"\\x\n', k=draw.randint(0, 20))) for _ in range(3)]
            rows = [{"a": text, "b": [[{"c": '\\"'}]], "d": [[[[[[[text]]]]]]]} for text in texts]
            lines = "\n".join(map(json.dumps, rows)).encode()
            level = deepest(lines)
            monkeypatch.setattr(depth, "DEEPEST", level)
            Shallow(io.BytesIO(lines)).read()
            monkeypatch.setattr(depth, "DEEPEST", level - SLACK - 1)
            with pytest.raises(ValueError):  # noqa: PT011
                Shallow(io.BytesIO(lines)).read()


@pytest.mark.parametrize("what", DEEP)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz"])
def test_a_file_nested_too_deep_is_refused(tmp_path, what, name):
    path = tmp_path / name
    good = b'{"prompt": "x"}\n'
    content = (good if not name.endswith(".json") else b"") + DEEP[what] + b"\n"
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for cache in (None, str(tmp_path / "cache")):
        with pytest.raises(DataError) as caught:
            read_files(str(path), ["prompt"], cache_dir=cache)
        assert caught.value.field == str(path)
    wrong = [row for row, found, _ in scan(path) if found is None]
    assert wrong or name.endswith(".json")


def test_brackets_within_strings_and_what_is_nested_less_are_read(tmp_path):
    path, value = tmp_path / "rows.jsonl", 1
    for _ in range(DEEPEST - 10):
        value = [value]
    for rows in ([{"prompt": "[{" * 50_000}, {"prompt": '\\"[' * 1000}], [{"prompt": "x", "extra": value}]):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        assert read_files(str(path), ["prompt"], optional=None).table.to_pylist() == rows
