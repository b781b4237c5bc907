"""Fixtures for the viewer's tests: one Chromium for all tests of the page, and runs to show."""

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tandem.observability.run import RunFolder
from tests.support.hostile_texts import TEXTS
from tests.support.viewing import sample_table, viewing, write_viewed
from tests.support.viewing_page import Viewer

if TYPE_CHECKING:
    pass


@pytest.fixture(scope="session")
def browser():
    """Yield a Chromium browser. Without Chromium, skip the test (CONTRIBUTING.md says how to get it)."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, from the extra `dev`")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Write the runs that the tests show.

    Two runs differ in a key of the config. One has only losses, one has hostile texts, one has values of odd
    kinds, and one is of a later version.
    """
    root = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        write_viewed(root / name)
    with (root / "b" / "config.yaml").open("a") as file:
        file.write("data: {seed: 7}\n")
    write_viewed(root / "later", steps=1)
    with (root / "later" / "events.jsonl").open("a") as file:
        file.write('{"event": "start", "format": 2}\n')
    taught = RunFolder(root / "taught")
    for step in (1, 2, 3):
        taught.log_metrics(step, {"sft/loss": 1 / step, "val/loss": 2 / step, "sft/grad_norm": 1.0})
    write_viewed(root / "odd", steps=1)
    with (root / "odd" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": "much", "actor/kl": [1], "actor/entropy": {}}\n')
    with (root / "odd" / "events.jsonl").open("a") as file:
        file.write('{"event": "warning", "time": 7, "name": [5], "step": "x", "text": {}}\n{"event": "x"}\n')
    hostile = RunFolder(write_viewed(root / "hostile", steps=1))
    table = sample_table(1)
    copies = [text[:20_000] for text in TEXTS]
    many = {name: [column[0]] * len(copies) for name, column in table.items() if isinstance(column, list)}
    ragged = {name: column[[0] * len(copies)] for name, column in table.items() if hasattr(column, "offsets")}
    many |= dict.fromkeys(
        ("response_text", "reward_why", "ground_truth", "data_source", "finish_reason"), copies
    )
    many["messages"] = [[{"role": "user", "content": text}] for text in copies]
    many["uid"] = np.array([f"u{number}" for number in range(len(copies))], dtype=object)
    hostile.write_samples(1, many | ragged | {"scores": np.arange(len(copies), dtype=np.float32)})
    return root


@pytest.fixture(scope="session")
def client_of_all(runs):
    with viewing(runs) as found:
        yield found


@pytest.fixture
def viewer(browser, client_of_all, runs):
    page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
    page.set_default_timeout(20_000)
    found = Viewer(page, client_of_all, runs)
    yield found
    assert found.wrong == []
    assert {url.partition("#")[0].startswith((client_of_all.url, "about:")) for url in found.asked} <= {True}
    page.close()
