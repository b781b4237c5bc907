import shutil

import pytest

from tandem.observability.run import RunFolder
from tests.support.hostile_texts import TEXTS
from tests.support.viewing import STEPS, many_samples, viewing, write_viewed
from tests.support.viewing_page import Viewer


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
    """Write the runs that the tests show; b differs from a in a key, and taught has only losses."""
    root = tmp_path_factory.mktemp("runs")
    for name, steps in (("a", STEPS), ("b", STEPS), ("later", 1), ("odd", 1)):
        write_viewed(root / name, steps=steps)
    for name, more in (
        ("b/config.yaml", "data: {seed: 7}\n"),
        ("later/events.jsonl", '{"event": "start", "format": 2}\n'),
        ("odd/metrics.jsonl", '{"step": 2, "reward/mean": "much", "actor/kl": [1], "actor/entropy": {}}\n'),
        ("odd/events.jsonl", '{"event": "warning", "time": 7, "name": [5], "step": "x", "text": {}}\n'),
        ("odd/events.jsonl", '{"event": "x"}\n'),
    ):
        with (root / name).open("a") as file:
            file.write(more)
    taught = RunFolder(root / "taught")
    for step in (1, 2, 3):
        taught.log_metrics(step, {"sft/loss": 1 / step, "val/loss": 2 / step, "sft/grad_norm": 1.0})
    hostile = RunFolder(write_viewed(root / "hostile", steps=1))
    copies = [text[:20_000] for text in TEXTS]
    table = many_samples(len(copies))
    names = ("response_text", "reward_why", "ground_truth", "data_source", "finish_reason")
    table |= dict.fromkeys(names, copies)
    table["messages"] = [[{"role": "user", "content": text}] for text in copies]
    hostile.write_samples(1, table | {"uid": [f"u{number}" for number in range(len(copies))]})
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
