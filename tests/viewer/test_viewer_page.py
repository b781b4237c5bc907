"""The page of `tandem view` in Chromium: every page and every action, by pointer and by keyboard."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

import numpy as np
import pytest

from tandem.observability.run import RunFolder
from tests.support.hostile_texts import TEXTS
from tests.support.viewing import (
    GROUP,
    PROMPTS,
    STEPS,
    Client,
    sample_table,
    viewing,
    write_viewed,
    write_viewed_step,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

COUNT = PROMPTS * GROUP * STEPS
USED = "button, a, input, select, [role=img], [role=region], [tabindex]"
UNNAMED = """(used) => [...document.querySelectorAll(used)]
  .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length))
  .map((e) => e.outerHTML)"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in a key of the config, one with hostile texts, one of a later version."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        write_viewed(root / name)
    with (root / "b" / "config.yaml").open("a") as file:
        file.write("data: {seed: 7}\n")
    write_viewed(root / "later", steps=1)
    with (root / "later" / "events.jsonl").open("a") as file:
        file.write('{"event": "start", "format": 2}\n')
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


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[Client]:
    with viewing(runs) as found:
        yield found


class Viewer:
    """A tab: opens pages, and holds what went wrong in it."""

    def __init__(self, page: Page, client: Client, root: Path) -> None:
        self.page, self._client, self._root = page, client, root
        self.wrong: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))

    def open(self, name: str, *runs: str, **params: str) -> Page:
        query = [f"run={quote(str(self._root / run))}" for run in runs or ("a",)]
        query += [f"{key}={quote(value)}" for key, value in params.items()]
        self.page.goto("about:blank")
        self.page.goto(f"{self._client.url}#/{name}?{'&'.join(query)}")
        return self.page

    def params(self) -> dict[str, str]:
        """What the address says, but for the run."""
        found = parse_qs(urlsplit(self.page.url).fragment.partition("?")[2])
        return {name: values[0] for name, values in found.items() if name != "run"}

    def run(self, name: str) -> str:
        return str(self._root / name)


@pytest.fixture
def viewer(browser: Browser, client: Client, runs: Path) -> Iterator[Viewer]:
    page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
    page.set_default_timeout(20_000)
    found = Viewer(page, client, runs)
    yield found
    assert found.wrong == []
    assert {url.partition("#")[0].startswith((client.url, "about:")) for url in found.asked} <= {True}
    page.close()


def await_text(place: Locator, text: str | re.Pattern[str]) -> None:
    place.filter(has_text=text).first.wait_for()


def summary(viewer: Viewer, matched: int) -> None:
    await_text(viewer.page.locator(".summary"), f"{matched} of {COUNT} samples")


def test_overview_draws_runs_over_each_other_and_tells_what_happened(viewer: Viewer) -> None:
    page = viewer.open("overview", "a", "b")
    chart = page.get_by_role("img", name=re.compile("^reward.mean"))
    chart.locator("canvas").wait_for()
    name = chart.get_attribute("aria-label")
    assert name == f"reward/mean. {viewer.run('a')}: 0.1 to 0.6; {viewer.run('b')}: 0.1 to 0.6"
    groups = page.locator("main h2").all_text_contents()
    assert {"Reward", "Policy", "Throughput", "Devices", "Rollout engine"} <= set(groups)
    await_text(page.locator(".happened"), "2 warnings")
    await_text(page.locator(".happened"), "entropy_collapsed after step 4")
    assert page.locator("article.card").count() == page.locator("article.card canvas").count()
    chart.hover()
    await_text(chart.locator("figcaption"), re.compile(r"step \d"))
    await_text(page.locator("#config"), "What differs between the configs")
    await_text(page.locator("table.config"), "data.seed")
    rows = page.locator("table.config tbody tr").all_text_contents()
    assert [row for row in rows if row.startswith("data.seed")] == ["data.seed–7"]
    assert not any("samples_freq" in row for row in rows)
    page.get_by_label("Keys of the config").fill("samples_freq")
    await_text(page.locator("table.config"), "trainer.samples_freq")


def test_overview_controls_are_in_the_address_and_reopen(viewer: Viewer) -> None:
    page = viewer.open("overview")
    page.get_by_role("button", name="log", exact=True).click()
    page.get_by_label("Smoothing").fill("0.5")
    page.get_by_label("Metrics whose name contains").fill("entropy")
    await_text(page.locator(".card h3"), "actor/entropy")
    page.get_by_role("button", name="actor/entropy").click()
    page.locator("article.big canvas").wait_for()
    assert viewer.params() == {"log": "1", "smooth": "0.5", "metric": "entropy", "big": "actor/entropy"}
    box = page.locator("article.big .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60, steps=4)
    page.mouse.up()
    button = page.get_by_role("button", name=re.compile("^Steps"))
    button.wait_for()
    assert (viewer.params()["from"], viewer.params()["to"]) == ("3", "4")
    page.reload()
    page.locator("article.big canvas").wait_for()
    assert page.get_by_label("Metrics whose name contains").input_value() == "entropy"
    last = smoothed_last([1 / step for step in range(1, STEPS + 1)], 0.5)
    assert page.locator("article.big .last").text_content().strip() == f"{last:.4g}"
    button.click()
    assert "from" not in viewer.params()


def smoothed_last(values: list[float], weight: float) -> float:
    mean = values[0]
    for value in values[1:]:
        mean = weight * mean + (1 - weight) * value
    return mean


def test_runs_are_chosen_by_a_click_and_added_by_a_tick(viewer: Viewer) -> None:
    page = viewer.open("overview")
    page.get_by_label(f"Show {viewer.run('b')} too").check()
    await_text(page.locator(".facts h2"), viewer.run("b"))
    assert page.locator(".facts").count() == 2
    page.get_by_role("button", name=re.compile("b finished")).click()
    page.wait_for_function("document.querySelectorAll('.facts').length === 1")
    assert page.locator(".facts h2").text_content() == viewer.run("b")


def test_a_run_of_another_version_is_refused_with_the_reason(viewer: Viewer) -> None:
    page = viewer.open("overview", "later")
    await_text(page.get_by_role("alert"), "of another version")
    assert page.locator(".chart").count() == 0


def test_the_page_follows_a_run_that_is_written(viewer: Viewer, client: Client, runs: Path) -> None:
    folder = RunFolder(write_viewed(runs / "alive", steps=2))
    client.server.api._shelf._searched = -100.0
    page = viewer.open("overview", "alive")
    await_text(page.get_by_role("img", name=re.compile("^reward.mean")), "")
    write_viewed_step(folder, 3)
    page.get_by_role("img", name=re.compile(r"^reward.mean.*0\.1 to 0\.3")).wait_for()
    viewer.open("samples", "alive")
    await_text(page.locator(".summary"), "24 of 24 samples")
    write_viewed_step(folder, 4)
    await_text(page.locator(".summary"), "32 of 32 samples")


def test_samples_are_filtered_by_text_ranges_and_ticks(viewer: Viewer) -> None:
    page = viewer.open("samples")
    summary(viewer, COUNT)
    page.keyboard.press("/")
    page.keyboard.type("answer 3")
    summary(viewer, STEPS)
    assert page.locator("table.samples tbody tr").count() == STEPS
    page.get_by_label("Text in prompt or response").first.fill("")
    page.get_by_label("sums").check()
    summary(viewer, COUNT // 2)
    page.get_by_label("stop").check()
    summary(viewer, COUNT // 4)
    page.get_by_label("Least step").fill("3")
    page.keyboard.press("Tab")
    summary(viewer, 8)
    page.get_by_label("Greatest step").fill("4")
    page.keyboard.press("Tab")
    summary(viewer, 4)
    assert viewer.params() == {"source": "sums", "finish": "stop", "step": "3..4"}
    page.reload()
    summary(viewer, 4)
    page.get_by_role("button", name="All of step").click()
    summary(viewer, COUNT // 4)
    page.get_by_role("button", name="validation").click()
    await_text(page.locator(".empty"), "No sample meets all of this")
    page.get_by_role("button", name="Clear filters").click()
    summary(viewer, COUNT)
    assert viewer.params() == {}


def test_a_histogram_is_brushed(viewer: Viewer) -> None:
    page = viewer.open("samples")
    bars = page.locator('[data-column="step"] .bars')
    bars.wait_for()
    box = bars.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 1.5 / STEPS, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 3.5 / STEPS, box["y"] + 20, steps=3)
    page.mouse.up()
    summary(viewer, 3 * 8)
    assert viewer.params() == {"step": "2..4"}
    assert bars.locator("i.lit").count() == 3


def test_samples_are_sorted_paged_and_walked_by_keys(viewer: Viewer) -> None:
    page = viewer.open("samples")
    page.locator("table.samples").wait_for()
    page.locator("thead").get_by_role("button", name="score").click()
    page.locator('th[aria-sort="descending"]', has_text="score").wait_for()
    page.locator("thead").get_by_role("button", name="score").click()
    page.locator('th[aria-sort="ascending"]', has_text="score").wait_for()
    page.locator('.listed[aria-busy="false"]').wait_for()
    assert page.locator(".score b").first.text_content() == "0.1"
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.dataset.row") == "0"
    page.keyboard.press("Enter")
    await_text(page.locator("h1"), "Step 1")
    assert viewer.params()["id"] == "step_000001:0"
    page.keyboard.press("j")
    page.wait_for_function("location.hash.includes('step_000001%3A1')")
    page.keyboard.press("u")
    page.locator("table.samples").wait_for()
    assert viewer.params() == {"sort": "score", "direction": "up"}


def test_what_is_selected_is_exported(viewer: Viewer) -> None:
    page = viewer.open("samples", step="2", source="words")
    summary(viewer, GROUP)
    with page.expect_download() as waited:
        page.get_by_role("link", name="Export JSONL").click()
    rows = [json.loads(line) for line in Path(waited.value.path()).read_text().splitlines()]
    assert [row["response"] for row in rows] == [f"Answer {number} of step 2" for number in range(4, 8)]
    with page.expect_download() as waited:
        page.get_by_role("link", name="CSV").click()
    assert len(Path(waited.value.path()).read_text().splitlines()) == 1 + GROUP


def test_a_sample_shows_turns_score_and_exact_values_of_its_tokens(viewer: Viewer) -> None:
    page = viewer.open("sample", id="step_000003:1")
    await_text(page.locator(".scored"), "answer 7, expected 8")
    assert page.locator(".big-score b").text_content() == "0.3"
    assert page.locator(".turn .role").all_text_contents() == ["user", "assistant", "tool", "assistant"]
    assert page.locator(".turn pre").all_text_contents() == [
        "what is 0",
        "seven answer call",
        "result",
        "seven end",
    ]
    expected = {
        "advantages": 1.5, "rollout_log_probs": -0.2, "old_log_probs": 0.3, "difference": 0.5,
        "ratio": math.exp(0.5), "policy_version": 3,
    }  # fmt: skip
    tokens = page.locator(".tokens > span")
    tokens.nth(2).hover()
    for name, value in expected.items():
        shown = page.locator(f'dd[data-value="{name}"]').text_content()
        assert float(shown) == pytest.approx(value, abs=1e-6), name
    assert page.locator('dd[data-value="response_mask"]').text_content() == "yes"
    await_text(page.locator(".note"), "entropy, as runs keep the entropy of a step")


@pytest.mark.parametrize(
    ("colour", "tinted"),
    [
        ("advantage", {2: "plus", 3: "minus", 4: "plus", 7: "plus"}),
        ("log-prob", {2: "plus", 3: "plus", 4: "plus", 6: "plus"}),
        ("ratio", dict.fromkeys((2, 3, 4, 6, 7), "plus")),
        ("difference", dict.fromkeys((2, 3, 4, 6, 7), "plus")),
        ("mask", dict.fromkeys((2, 3, 4, 6, 7), "plus")),
        ("version", dict.fromkeys((2, 3, 4, 6, 7), "plus")),
    ],
)
def test_tokens_are_coloured_by_what_is_chosen(viewer: Viewer, colour: str, tinted: dict[int, str]) -> None:
    page = viewer.open("sample", id="step_000003:1")
    page.get_by_role("combobox", name="Colour").select_option(colour)
    page.wait_for_function("colour => location.hash.includes(colour)", arg=f"colour={colour}")
    styles = page.locator(".tokens > span").evaluate_all("all => all.map((e) => e.style.background)")
    found = {place: re.search(r"--(plus|minus)", style)[1] for place, style in enumerate(styles) if style}
    assert found == tinted


def test_tokens_are_walked_by_keys_and_linked(viewer: Viewer) -> None:
    page = viewer.open("sample", id="step_000003:1")
    page.locator(".tokens").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    page.wait_for_function("location.hash.includes('token=1')")
    await_text(page.locator(".token-text"), '"is"')
    page.reload()
    await_text(page.locator(".token-text"), '"is"')


def test_a_group_stands_side_by_side_and_a_prompt_is_followed(viewer: Viewer) -> None:
    page = viewer.open("sample", id="step_000003:1")
    cards = page.locator(".side-by-side .card")
    cards.first.wait_for()
    assert [text for text in cards.locator("pre").all_text_contents()] == [
        f"Answer {number} of step 3" for number in range(GROUP)
    ]
    assert page.locator(".side-by-side [aria-current]").text_content().startswith("#1")
    page.get_by_role("img", name=re.compile("Mean score of this prompt. mean score: 0.1 to 0.6")).wait_for()
    steps = page.locator(".history .n:first-child").all_text_contents()
    assert steps == [f"step {step}" for step in range(1, STEPS + 1) for _ in range(GROUP)]
    page.locator(".history a").last.click()
    await_text(page.locator("h1"), f"Step {STEPS}")
    cards.nth(0).click()
    page.wait_for_function("location.hash.includes('step_000006%3A0')")


def test_time_shows_a_step_and_who_waited(viewer: Viewer) -> None:
    page = viewer.open("time", step="2")
    gantt = page.get_by_role("img", name=re.compile("Step 2: 5 phases of 3 workers in 2.00 s"))
    gantt.wait_for()
    assert gantt.locator("text.track").all_text_contents() == [
        "controllercontroller", "actor rank 0actor rank 0", "actor rank 1actor rank 1"
    ]  # fmt: skip
    widths = gantt.locator("rect.phase-1").evaluate_all(
        "all => all.map((e) => Number(e.getAttribute('width')))"
    )
    whole = gantt.locator("rect.phase-whole").evaluate("e => Number(e.getAttribute('width'))")
    assert widths == [pytest.approx(whole / 2, rel=1e-3)] * 2
    gantt.locator("rect.phase-1").first.hover()
    await_text(page.locator(".gantt .note"), "actor rank 0 · update_actor · 1.00 s, from 1.00 s to 2.00 s")
    table = page.locator("section", has=page.locator("#waits")).locator("tbody tr")
    assert table.all_text_contents() == ["actor rank 0500 msactor rank 1 in gen 100% of it"]
    phases = page.locator(".bars-table tbody tr").all_text_contents()
    assert phases == ["update_actor2.00 s", "gen1.50 s"]
    moved = page.locator("section", has=page.locator("#moved")).locator("tbody tr")
    moved.first.wait_for()
    assert moved.first.text_content() == "actor50%–250 ms2.0 MB250 ms–"
    page.get_by_role("button", name="Next step").click()
    page.get_by_role("img", name=re.compile("Step 3:")).wait_for()
    page.keyboard.press("k")
    page.get_by_role("img", name=re.compile("Step 2:")).wait_for()
    page.get_by_role("combobox", name="Step").select_option("5")
    page.get_by_role("img", name=re.compile("Step 5:")).wait_for()
    page.locator('[data-column="length"] .bars').click()
    summary(viewer, 8)
    assert viewer.params() == {"step": "5", "length": "5..5", "kind": "train"}


def test_trust_says_what_is_wrong(viewer: Viewer) -> None:
    page = viewer.open("trust")
    await_text(page.locator(".verdict"), "Rollout and training")
    bad = page.locator(".verdict.bad").all_text_contents()
    assert [text.startswith("Rollout and training0.001 nats") for text in bad] == [True]
    assert page.locator(".verdict.fair h3").all_text_contents() == ["Starts", "Warnings"]
    assert page.locator(".event .kind").all_text_contents() == ["start", "warning", "start", "end"]
    page.get_by_role("img", name=re.compile("^Mean difference of log-probs")).wait_for()
    assert page.locator(".log p").count() == 1
    await_text(page.locator(".log"), "stale weights. Remedy")
    page.get_by_label(re.compile("All lines")).check()
    await_text(page.locator(".log"), "saved it")
    await_text(page.locator("table.narrow"), "0123456789abcdef")
    page.get_by_role("link", name="The lowest scored samples").click()
    page.locator('th[aria-sort="ascending"]', has_text="score").wait_for()


def test_hostile_texts_are_shown_and_not_obeyed(viewer: Viewer) -> None:
    page = viewer.open("samples", "hostile", sort="score", direction="up")
    page.locator("table.samples").wait_for()
    assert page.locator(".words a").count() == 50
    await_text(page.locator(".asked").nth(0), "<script>window.hit = 1</script>")
    for row in range(0, len(TEXTS), 4):
        viewer.open("sample", "hostile", id=f"step_000001:{row}")
        page.locator(".turn.assistant").first.wait_for()
    viewer.open("sample", "hostile", id=f"step_000001:{TEXTS.index('nul ' + chr(0) + ' within')}")
    await_text(page.locator(".turn .hidden-character"), "␀")
    viewer.open("sample", "hostile", id=f"step_000001:{TEXTS.index(chr(0x202E) + ' right to left')}")
    await_text(page.locator(".turn .hidden-character"), "U+202E")
    assert page.evaluate("window.hit") is None
    assert (
        page.locator("main").locator("script, img, iframe, object, base, meta, style, link, svg").count() == 0
    )


def test_pages_are_changed_by_keys_and_keys_are_told(viewer: Viewer) -> None:
    page = viewer.open("overview")
    page.locator(".facts").first.wait_for()
    for key, title in (("2", "Samples"), ("3", "Time"), ("4", "Trust"), ("1", "Overview")):
        page.keyboard.press(key)
        await_text(page.locator(".bar [aria-current=page]"), title)
    page.keyboard.press("?")
    await_text(page.get_by_role("dialog"), "next and previous sample")
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    page.go_back()
    await_text(page.locator(".bar [aria-current=page]"), "Trust")


def test_colours_follow_the_system_and_the_toggle(viewer: Viewer, browser: Browser, client: Client) -> None:
    page = viewer.open("overview")
    page.locator(".facts").first.wait_for()
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.get_by_role("button", name="Dark colours").click()
    page.get_by_role("button", name="Light colours").wait_for()
    dark = page.evaluate(paper)
    assert light != dark
    page.reload()
    page.get_by_role("button", name="Light colours").wait_for()
    page.keyboard.press("t")
    page.get_by_role("button", name="Dark colours").wait_for()
    other = browser.new_page(color_scheme="dark")
    other.goto(client.url)
    other.locator(".facts").first.wait_for()
    assert other.evaluate(paper) == dark
    other.close()


@pytest.mark.parametrize("name", ["overview", "samples", "sample", "time", "trust"])
@pytest.mark.parametrize("width", [420, 1400])
def test_every_page_fits_its_width_and_names_what_can_be_used(viewer: Viewer, name: str, width: int) -> None:
    viewer.page.set_viewport_size({"width": width, "height": 900})
    page = viewer.open(name, **({"id": "step_000003:1"} if name == "sample" else {}))
    page.locator("main section, main table").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(UNNAMED, USED) == []
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.outerHTML.slice(0, 200)"))
    assert len(reached) >= 10


def test_what_there_is_not_is_said(viewer: Viewer) -> None:
    page = viewer.open("nowhere")
    await_text(page.locator(".empty"), "There is no page of this name")
    viewer.wrong.clear()
    viewer.open("sample", id="step_000099:0")
    await_text(page.get_by_role("alert"), "no such sample")
    assert all("400" in said for said in viewer.wrong)
    viewer.wrong.clear()
