import json
import os
import shutil
import socket
import threading
import time
from contextlib import ExitStack, suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.cli.main import main
from tandem.errors import DataError
from tandem.observability.files import GrowingFile
from tandem.observability.inside import require_inside
from tandem.observability.reading import Run
from tandem.offline.export import export_checkpoint
from tandem.viewer import api, sample, server
from tests.support.viewing import viewing, write_viewed

SECRET = "what another folder holds"
MANY, LONG = 20_000, 300_000


def _crowd(folder):
    """Write one group of many samples with long texts, and one sample with very many tokens and turns."""
    lists = pa.ListArray.from_arrays(np.arange(0, 2 * MANY + 1, 2, dtype=np.int32), pa.array([1, 2] * MANY))
    crowd = {"scores": np.zeros(MANY, np.float32), "tokens": lists, "uid": ["one"] * MANY}
    crowd["response_text"] = pa.array(["ä" * 300] * MANY).dictionary_encode().cast(pa.string())
    crowd["response_mask"] = lists.cast(pa.list_(pa.bool_()))
    crowd |= {"data_source": ["s" * 500] * MANY, "finish_reason": ["f" * 500] * MANY}
    pq.write_table(pa.table(crowd), folder / "step_000001.parquet")
    numbers = pa.array([[1] * LONG])
    long = {"scores": [0.0], "response_text": ["y" * (3 * LONG)], "tokens": numbers, "uid": ["two"]}
    long["response_mask"] = pa.array([[False, True] * (LONG // 2)])
    long["messages"] = [[{"role": "user", "content": "x" * 100}] * 50_000]
    long |= {f"c{number}": numbers for number in range(3)}
    long |= {f"text{number}": ["z" * 100_000] for number in range(200)}
    pq.write_table(pa.table(long), folder / "step_000002.parquet")


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    run = write_viewed(tmp_path_factory.mktemp("crowded") / "run", steps=1)
    _crowd(run / "samples")
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(2, 20):
            more = {f"more/{step}/{number}": 1.0 for number in range(1000)}
            file.write(json.dumps({"step": step, "reward/mean": 1.0, **more}) + "\n")
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "warning", "name": "n", "step": 1, "text": "%s"}\n' % ("w" * LONG))
        file.writelines('{"event": "warning", "name": "n", "step": 1, "text": "t"}\n' for _ in range(10_000))
    with (run / "config.yaml").open("a") as file:
        file.write(f"long: {'v' * LONG}\n")
    with (run / "log" / "run.log").open("a") as file:
        file.write("l" * (3 * LONG))
    return run


@pytest.fixture(scope="module")
def client(crowded):
    with viewing(crowded) as found:
        yield found


@pytest.mark.parametrize(
    "question",
    ["runs?", "metrics?names=reward/mean", "config?", "events?", "samples?limit=200", "history?prompt=0",
     "sample?id=step_000001:10000", "sample?id=step_000002:0", "time?"],
)  # fmt: skip
def test_every_answer_is_bounded(client, crowded, question):
    status, body = client.get(f"api/{question}&run={crowded}")
    assert (status, len(body) < 4 << 20) == (200, True), len(body)


def test_an_answer_beyond_all_limits_is_refused_by_name(client, crowded, monkeypatch):
    monkeypatch.setattr(server, "ANSWER_BYTES", 1000)
    status, body = client.get(f"api/events?run={crowded}")
    assert (status, "1,000" in json.loads(body)["error"]) == (400, True)


def test_a_group_comes_in_pages(client, crowded):
    def rows(**more):
        found = client.ask("sample", run=crowded, **more)
        ids = [int(row["id"].partition(":")[2]) for row in found["group"]]
        return ids, found["group_start"], found["group_total"]

    half = sample.GROUP // 2
    assert rows(id="step_000001:10000") == ([*range(10_000 - half, 10_000 + half)], 10_000 - half, MANY)
    assert rows(id="step_000001:0") == ([*range(sample.GROUP)], 0, MANY)
    assert rows(id="step_000001:0", group=15_000)[0] == [*range(15_000, 15_000 + sample.GROUP)]
    assert rows(id="step_000001:0", group=MANY)[0] == [*range(MANY - sample.GROUP, MANY)]
    assert rows(id="step_000002:0") == ([0], 0, 1)


def test_the_last_events_are_told_and_long_ones_are_cut(client, crowded):
    assert len(client.ask("events", run=crowded)["events"]) == api.LISTED
    with (crowded / "events.jsonl").open("a") as file:
        file.write('{"event": "warning", "name": "last", "step": 1, "text": "%s"}\n' % ("w" * LONG))
    last = client.ask("events", run=crowded)["events"][-1]
    assert (last["name"], len(last["text"])) == ("last", api.LONG)


MANIFEST = "checkpoints/step_000004/manifest.json"
OUTSIDE = [
    "log/run.log", "log/failure.txt", "log", "config.yaml", "events.jsonl", "metrics.jsonl", "timeline.json",
    "samples/step_000001.parquet", "samples", MANIFEST, "checkpoints",
]  # fmt: skip


@pytest.fixture
def linked(tmp_path):
    """Create a run in which one part is a link to the same part of another folder."""
    other = write_viewed(tmp_path / "other", steps=1)
    line = json.dumps({"step": 1, "event": SECRET, SECRET: 1.0, "text": SECRET}) + "\n"
    contents = {"log/failure.txt": SECRET, "log/run.log": SECRET, "config.yaml": f"secret: {SECRET}\n"}
    contents |= {name: (other / name).read_text() + line for name in ("metrics.jsonl", "events.jsonl")}
    contents[MANIFEST] = json.dumps({"sha256": SECRET, "files": {}})
    for name, content in contents.items():
        (other / name).write_text(content)
    samples = other / "samples" / "step_000001.parquet"
    table = pq.read_table(samples)
    place = table.column_names.index("response_text")
    pq.write_table(table.set_column(place, "response_text", pa.array([SECRET] * len(table))), samples)

    def made(part):
        run = write_viewed(tmp_path / "run", steps=1)
        (run / "log" / "failure.txt").write_text("failed")
        path = run / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(other / part)
        return run

    return made


ROUTES = ("runs", "metrics", "config", "events", "samples", "sample", "history", "time", "export")


@pytest.mark.parametrize("part", OUTSIDE)
def test_nothing_is_read_through_a_link_out_of_the_folder(linked, part, capfd):
    run = linked(part)
    with viewing(run) as client:
        query = f"run={run}&id=step_000001:0&names=reward/mean&prompt=0"
        bodies = {route: client.get(f"api/{route}?{query}")[1] for route in ROUTES}
    assert [route for route, body in bodies.items() if SECRET[:16].encode() in body] == []
    for words in (["samples", str(run)], ["runs", str(run)], ["runs", "compare", str(run), str(run)],
                  ["logs", str(run), "run"], ["runs", "prune", str(run)]):  # fmt: skip
        main(words)
    assert SECRET not in "".join(capfd.readouterr())


def test_a_link_that_stays_within_the_folder_is_followed(tmp_path):
    run = write_viewed(tmp_path / "run", steps=1)
    (run / "events.jsonl").rename(run / "elsewhere")
    (run / "events.jsonl").symlink_to("elsewhere")
    (tmp_path / "link").symlink_to(run)
    assert len(Run(tmp_path / "link").events) == len(Run(run).events) > 0
    require_inside(run, run)


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/step_000004", MANIFEST])
def test_no_checkpoint_is_exported_or_pruned_through_a_link(linked, part, tmp_path):
    run = linked(part)
    with pytest.raises(DataError):
        export_checkpoint(run, tmp_path / "model")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", [part for part in OUTSIDE if "." in part] + ["run.lock"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_stops_nothing(tmp_path, part, make):
    run = write_viewed(tmp_path / "run", steps=1)
    (run / part).unlink(missing_ok=True)
    make(run / part)
    with viewing(run) as client:
        for route in ("runs", "metrics", "config", "events", "samples", "time"):
            assert client.get(f"api/{route}?run={run}")[0] in (200, 400)


@pytest.mark.parametrize("size", [1 << 40, 64 << 20])
def test_a_file_without_an_end_is_refused(tmp_path, size):
    """The file is sparse, so it takes no space on the disk."""
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(size)
    with pytest.raises(DataError):
        GrowingFile(path).look()


@pytest.fixture
def quick(tmp_path):
    with viewing(write_viewed(tmp_path / "run", steps=1)) as found:
        yield found


def _connected(client, held, timeout=10):
    address = ("127.0.0.1", client.server.server_port)
    return held.enter_context(socket.create_connection(address, timeout=timeout))


@pytest.fixture
def held():
    with ExitStack() as held:
        yield held


def _answers(client):
    began = time.monotonic()
    assert client.get("api/runs")[0] == 200
    return time.monotonic() - began


@pytest.mark.slow
def test_half_open_connections_keep_nobody_out(quick, held):
    silent = [_connected(quick, held, 5) for _ in range(400)]
    assert max(_answers(quick) for _ in range(5)) < 2
    slow = [_connected(quick, held, 5) for _ in range(400)]
    for byte in b"GET / H":
        for each in slow:
            with suppress(OSError):  # the server has closed the connection, as expected
                each.send(bytes([byte]))
        assert _answers(quick) < 2
        time.sleep(0.2)
    assert len(quick.server._connections) <= server.CONNECTIONS
    own = [thread for thread in threading.enumerate() if "process_request" in thread.name]
    assert len(own) <= server.CONNECTIONS + 10
    assert silent[0].recv(1) == b""


@pytest.mark.parametrize("sent", [b"", b"GET ", b"GET /x HTTP/1.1\r\nA: b\r\n"])
def test_a_head_has_a_limit_of_time(quick, held, monkeypatch, sent):
    monkeypatch.setattr(server, "HEAD_S", 1.0)
    connection = _connected(quick, held)
    connection.sendall(sent)
    connection.settimeout(0.3)
    began = time.monotonic()
    with suppress(ConnectionError):
        while True:
            try:  # single bytes do not extend the time limit
                if connection.recv(100) == b"":
                    break
            except TimeoutError:
                connection.send(b"x")
            assert time.monotonic() - began < 5
    assert _answers(quick) < 2


def test_a_request_with_a_body_is_refused_and_its_connection_closed(quick, held):
    request = f"GET {quick.path}api/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nGET / HTT"
    connection = _connected(quick, held)
    connection.sendall(request.encode())
    answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
