import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from tandem.cli.main import main
from tandem.observability.run import RunFolder
from tandem.viewer.sample import LONGEST
from tandem.viewer.server import Server
from tests.support.hostile_texts import TEXTS
from tests.support.viewing import sample_table, viewing, write_viewed

ROUTES = ("runs", "metrics", "config", "events", "samples", "sample", "history", "time", "export")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Write a run whose step N + 1 has text N in all text fields of its first sample."""
    folder = RunFolder(write_viewed(tmp_path_factory.mktemp("hostile") / "run", steps=1))
    for step, text in enumerate(TEXTS, 1):
        short = text[:1000]
        table = sample_table(step, [text, *[short] * 7])
        table["messages"] = [[{"role": text[:100], "content": text}], *[[{"role": "", "content": short}]] * 7]
        table["uid"] = np.array(["first", *["other"] * 7], dtype=object)
        for name in ("reward_why", "ground_truth", "data_source", "finish_reason"):
            table[name] = [short] * 8
        table["reward_extra"] = [{text[:100]: 1.0}] * 8
        folder.write_samples(step, table)
    folder.event("warning", name=TEXTS[0], step=1, text="\ud800 half " + "".join(TEXTS[:50]))
    return folder.path


@pytest.fixture(scope="module")
def client(hostile):
    with viewing(hostile) as found:
        yield found


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_answers_without_the_token(client, route):
    for start in ("", "/", f"/{client.server.token[:-1]}", "/x"):
        status, body = client.get(f"{start}/api/{route}")
        assert (status, "token" in json.loads(body)["error"]) == (403, True)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]:1"])
def test_another_sites_name_for_this_machine_is_refused(client, host):
    request = f"GET {client.path}api/runs HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", client.server.server_port)) as connection:
        connection.sendall(request.encode())
        assert connection.makefile("rb").readline() == b"HTTP/1.1 403 Forbidden\r\n"


def test_this_machines_own_names_are_taken_at_any_port_and_nothing_but_get_is_answered(client):
    for host in ("localhost:9", "127.0.0.1", "[::1]:8000"):
        assert client.get("api/runs", host=host)[0] == 200, host
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"):
        assert client.get("api/runs", method=method)[0] == 501, method


PATHS = """../api/../../../etc/passwd %2e%2e/%2e%2e/etc/passwd vendor/../../server.py ..%5c..%5cserver.py
/etc/passwd static/index.html api/../index.html api/ vendor %00index.html"""


@pytest.mark.parametrize("path", PATHS.split())
def test_no_address_leads_to_another_file(client, path):
    status, body = client.get(f"{client.path}{path}")
    assert (status, json.loads(body)["error"]) == (404, "no such page")


def test_every_answer_forbids_scripts_of_others(client):
    own = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
    for path in ("", "app.js", "api/runs", "nothing", "/nothing"):
        _, headers = client.get(path, whole=True)[1]
        policy = headers["Content-Security-Policy"]
        assert policy.startswith(own) and "unsafe" not in policy
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    page = client.get("")[1].decode()
    assert page.count("<script") == page.count('<script type="module" src="app.js"></script>') == 1


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup_of_texts(client):
    own = {name: content.decode() for name, content in client.server.files.items() if "vendor/" not in name}
    assert {"app.js", "style.css", "index.html"} <= own.keys()
    forbidden = re.compile(r"https?:|innerHTML|dangerously|eval\(|document\.write|@import")
    for name, content in own.items():
        assert forbidden.search(content.replace("http://www.w3.org/2000/svg", "")) is None, name


@pytest.mark.parametrize("step", range(1, len(TEXTS) + 1))
def test_a_hostile_text_arrives_as_it_is(client, hostile, step):
    text = TEXTS[step - 1]
    found = client.ask("sample", run=hostile, id=f"step_{step:06d}:0")
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}… [{len(text) - LONGEST:,} more characters]"
    assert (found["response"], found["turns"][0]["text"], found["characters"]) == (shown, shown, len(text))
    assert found["facts"]["reward_why"] == text[:1000]
    row = client.ask("samples", run=hostile, step=step, limit=1)["rows"][0]
    assert row["response"] == text[:300]
    if 0 < len(text) < 1000 and text.strip():
        assert client.ask("samples", run=hostile, text=text)["matched"] >= 8


def test_a_hostile_text_is_exported_whole(client, hostile):
    for format_ in ("jsonl", "csv"):
        status, body = client.get(f"api/export?run={hostile}&format={format_}&step=1..30")
        assert status == 200
        assert body.decode().count("window.hit") >= 8 * 15
    longest = TEXTS.index(max(TEXTS, key=len)) + 1
    lines = client.get(f"api/export?run={hostile}&step={longest}")[1].decode().splitlines()
    assert json.loads(lines[0])["response"] == TEXTS[longest - 1]
    assert client.ask("events", run=hostile)["events"][-1]["text"].startswith("\ud800 half ")


def test_the_command_refuses_a_missing_folder_and_a_taken_port(client, hostile, tmp_path, capsys):
    assert main(["view", str(tmp_path / "none"), "--no-browser"]) == 1
    assert "no such folder" in capsys.readouterr().err
    assert main(["view", str(hostile), "--no-browser", "--port", str(client.server.server_port)]) == 1
    assert "choose another port" in capsys.readouterr().err


def test_the_command_says_what_to_do_about_a_folder_without_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Server, "serve_forever", lambda self: None)
    main(["view", str(tmp_path), "--no-browser"])
    assert f"no run was found below {tmp_path}" in capsys.readouterr().out


ROOT = Path(__file__).parents[2]
STATIC = ROOT / "tandem" / "viewer" / "static"


def test_the_wheel_has_every_file_of_the_page(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    page = {str(path.relative_to(ROOT)): path.read_bytes() for path in STATIC.rglob("*") if path.is_file()}
    assert {"tandem/viewer/static/index.html", "tandem/viewer/static/vendor/LICENSE.htm"} <= page.keys()
    assert {name: held.get(name) for name in page} == page


def test_every_vendored_file_is_named_with_its_licence():
    vendor = STATIC / "vendor"
    listed = (vendor / "VENDORED").read_text()
    for path in vendor.iterdir():
        assert path.name == "VENDORED" or path.name in listed, path.name


def test_own_modules_of_the_page_are_small():
    for path in STATIC.glob("*.js"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path.name
        assert max(map(len, lines)) <= 130, path.name
