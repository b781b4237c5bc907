import functools
import re
from pathlib import Path

import pytest

import tandem.viewer as viewer_package
from tandem.observability.run import RunFolder
from tandem.watch.trust import Cause
from tests.support.marks import slow_but
from tests.support.viewing import STEPS, write_viewed, write_viewed_step
from tests.support.viewing_page import await_text, summary

USED = "button, a, input, select, [role=img], [role=region], [tabindex]"
UNNAMED = """(used) => [...document.querySelectorAll(used)]
  .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length))
  .map((e) => e.outerHTML)"""


def test_overview_draws_runs_over_each_other_and_tells_what_happened(viewer):
    page = viewer.open("overview", "a", "b")
    chart = page.get_by_role("img", name=re.compile("^reward.mean"))
    chart.locator("canvas").wait_for()
    name = chart.get_attribute("aria-label")
    assert name == f"reward/mean. {viewer.run('a')}: 0.1 to 0.6; {viewer.run('b')}: 0.1 to 0.6"
    groups = page.locator("main h2").all_text_contents()
    assert {"Reward", "Policy", "Throughput", "Devices", "Rollout engine"} <= set(groups)
    for text in ("4 warnings", "entropy_collapsed after step 4"):
        await_text(page.locator(".happened"), text)
    assert page.locator("article.card").count() == page.locator("article.card canvas").count()
    chart.hover()
    await_text(chart.locator("figcaption"), re.compile(r"step \d"))
    await_text(page.locator("table.config"), "data.seed")
    rows = page.locator("table.config tbody tr").all_text_contents()
    assert [row for row in rows if row.startswith("data.seed")] == ["data.seed–7"]
    assert not any("samples_freq" in row for row in rows)
    page.get_by_label("Keys of the config").fill("samples_freq")
    await_text(page.locator("table.config"), "trainer.samples_freq")


def test_overview_controls_are_in_the_address_and_reopen(viewer):
    page = viewer.open("overview")
    page.get_by_role("button", name="log", exact=True).click()
    page.get_by_label("Smoothing").fill("0.5")
    page.get_by_label("Metrics whose name contains").fill("entropy")
    await_text(page.locator(".card h3"), "actor/entropy")
    page.get_by_role("button", name="actor/entropy").click()
    page.locator("article.big canvas").wait_for()
    assert viewer.params() == {"log": "1", "smooth": "0.5", "metric": "entropy", "big": "actor/entropy"}
    viewer.drag(page.locator("article.big .u-over"), 0.3, 0.7)
    button = page.get_by_role("button", name=re.compile("^Steps"))
    button.wait_for()
    assert (viewer.params()["from"], viewer.params()["to"]) == ("3", "4")
    page.reload()
    page.locator("article.big canvas").wait_for()
    assert page.get_by_label("Metrics whose name contains").input_value() == "entropy"
    last = functools.reduce(lambda mean, step: 0.5 * mean + 0.5 / step, range(2, STEPS + 1), 1.0)
    assert page.locator("article.big .last").text_content().strip() == f"{last:.4g}"
    button.click()
    assert "from" not in viewer.params()


def test_runs_are_chosen_by_a_click_and_added_by_a_tick(viewer):
    page = viewer.open("overview")
    page.get_by_label(f"Show {viewer.run('b')} too").check()
    await_text(page.locator(".facts h2"), viewer.run("b"))
    assert page.locator(".facts").count() == 2
    page.get_by_role("button", name=re.compile("b finished")).click()
    page.wait_for_function("document.querySelectorAll('.facts').length === 1")
    assert page.locator(".facts h2").text_content() == viewer.run("b")


@pytest.mark.slow
def test_a_run_of_another_version_and_one_without_rewards(viewer):
    page = viewer.open("overview", "later")
    await_text(page.get_by_role("alert"), "format 2")
    assert page.locator(".chart").count() == 0
    viewer.open("overview", "taught")
    page.get_by_role("img", name=re.compile("^sft.loss")).locator("canvas").wait_for()
    assert page.locator("main h2").all_text_contents()[1:3] == ["Loss", "Policy"]


@pytest.mark.slow
def test_the_page_follows_a_run_that_is_written(viewer, client_of_all, runs):
    folder = RunFolder(write_viewed(runs / "alive", steps=2))
    client_of_all.server.api._shelf._searched = -100.0
    page = viewer.open("overview", "alive")
    await_text(page.get_by_role("img", name=re.compile("^reward.mean")), "")
    write_viewed_step(folder, 3)
    page.get_by_role("img", name=re.compile(r"^reward.mean.*0\.1 to 0\.3")).wait_for()
    viewer.open("samples", "alive")
    await_text(page.locator(".summary"), "24 of 24 samples")
    write_viewed_step(folder, 4)
    await_text(page.locator(".summary"), "32 of 32 samples")


def test_time_shows_a_step_and_who_waited(viewer):
    page = viewer.open("time", step="2")
    gantt = page.get_by_role("img", name=re.compile("Step 2: 5 phases of 3 workers in 2.00 s"))
    gantt.wait_for()
    tracks = [2 * name for name in ("controller", "actor rank 0", "actor rank 1")]
    assert gantt.locator("text.track").all_text_contents() == tracks
    width = "all => all.map((e) => Number(e.getAttribute('width')))"
    widths = gantt.locator("rect.phase-1").evaluate_all(width)
    (whole,) = gantt.locator("rect.phase-whole").evaluate_all(width)
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
    for step, go in (
        (3, page.get_by_role("button", name="Next step").click),
        (2, lambda: page.keyboard.press("k")),
        (5, lambda: page.get_by_role("combobox", name="Step").select_option("5")),
    ):
        go()
        page.get_by_role("img", name=re.compile(f"Step {step}:")).wait_for()
    page.locator('[data-column="length"] .bars').click()
    summary(viewer, 8)
    assert viewer.params() == {"step": "5", "length": "5..5", "kind": "train"}


def test_trust_says_what_is_wrong(viewer):
    page = viewer.open("trust")
    await_text(page.locator(".verdict.bad"), "Rollout and training")
    bad = page.locator(".verdict.bad").all_text_contents()
    assert [text.startswith("Rollout and training0.001 nats") for text in bad] == [True]
    assert page.locator(".verdict.fair h3").all_text_contents() == ["Starts", "Warnings"]
    happened = page.locator("[aria-labelledby=events] .event .kind").all_text_contents()
    assert happened == ["start", "warning", "warning", "start", "end"]
    causes = page.locator("[aria-labelledby=mismatch] .event").all_text_contents()
    (cause,) = (text.partition("warning")[2].strip() for text in causes)
    assert cause == "stale after step 3: The log-probs differ: stale weights, 2 updates behind"
    page.get_by_role("img", name=re.compile("^Mean difference of log-probs")).wait_for()
    assert page.locator(".log p").count() == 1
    await_text(page.locator(".log"), "a worker was lost")
    page.get_by_label(re.compile("All lines")).check()
    await_text(page.locator(".log"), "saved it")
    await_text(page.locator("table.narrow"), "0123456789abcdef")
    page.get_by_role("link", name="lowest scores").click()
    page.locator('th[aria-sort="ascending"]', has_text="score").wait_for()


def test_the_page_knows_every_cause_that_a_run_names():
    script = (Path(viewer_package.__file__).parent / "static" / "trust.js").read_text()
    listed = re.search(r"const CAUSES = \[(.*?)\]", script, re.DOTALL)
    assert listed is not None
    assert re.findall(r'"(\w+)"', listed[1]) == [cause.name.lower() for cause in Cause]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overview", "samples", "time", "trust"])
def test_values_of_another_kind_than_expected_are_shown_or_left_out(viewer, name):
    page = viewer.open(name, "odd")
    page.locator("main section, main table").first.wait_for()
    assert page.locator(".failure").count() == 0
    if name == "overview":
        await_text(page.locator(".facts dd"), "much")


def test_pages_are_changed_by_keys_and_keys_are_told(viewer):
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


@pytest.mark.slow
def test_colours_follow_the_system_and_the_toggle(viewer, browser, client_of_all):
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
    other.goto(client_of_all.url)
    other.locator(".facts").first.wait_for()
    assert other.evaluate(paper) == dark
    other.close()


@pytest.mark.parametrize(
    "name", slow_but(["samples", "time"], ["overview", "samples", "sample", "time", "trust"])
)
@pytest.mark.parametrize("width", slow_but([420], [420, 1400]))
def test_every_page_fits_its_width_and_names_what_can_be_used(viewer, name, width):
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


def test_what_there_is_not_is_said(viewer):
    page = viewer.open("nowhere")
    await_text(page.locator(".empty"), "There is no page of this name")
    viewer.wrong.clear()
    viewer.open("sample", id="step_000099:0")
    await_text(page.get_by_role("alert"), "no such sample")
    assert all("400" in said for said in viewer.wrong)
    viewer.wrong.clear()
