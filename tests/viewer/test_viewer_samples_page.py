import json
import math
import re
from pathlib import Path

import pytest

from tandem.observability.run import RunFolder
from tandem.viewer import sample
from tests.support.hostile_texts import TEXTS
from tests.support.marks import slow_but
from tests.support.viewing import GROUP, STEPS, many_samples, viewing, write_viewed
from tests.support.viewing_page import COUNT, Viewer, await_text, summary


@pytest.mark.slow
def test_samples_are_filtered_by_text_ranges_and_ticks(viewer):
    page = viewer.open("samples")
    summary(viewer, COUNT)
    page.keyboard.press("/")
    page.keyboard.type("answer 3")
    summary(viewer, STEPS)
    assert page.locator("table.samples tbody tr").count() == STEPS
    page.get_by_label("Text in prompt or response").first.fill("")
    for tick, count in (("sums", COUNT // 2), ("stop", COUNT // 4)):
        page.get_by_label(tick).check()
        summary(viewer, count)
    for label, step, count in (("Lowest step", "3", 8), ("Highest step", "4", 4)):
        page.get_by_label(label).fill(step)
        page.keyboard.press("Tab")
        summary(viewer, count)
    assert viewer.params() == {"source": "sums", "finish": "stop", "step": "3..4"}
    page.reload()
    summary(viewer, 4)
    page.get_by_role("button", name="All of step").click()
    summary(viewer, COUNT // 4)
    page.get_by_role("button", name="validation").click()
    await_text(page.locator(".empty"), "No sample matches")
    page.get_by_role("button", name="Clear filters").click()
    summary(viewer, COUNT)
    assert viewer.params() == {}


TYPE_WHILE_SEARCHING = """field => {
    const type = (text) => { field.value = text; field.dispatchEvent(new Event("input", {bubbles: true})); };
    window.addEventListener("hashchange", () => type("answer 3"), { once: true });
    type("answ");
}"""


@pytest.mark.slow
def test_letters_typed_while_a_search_begins_are_kept(viewer):
    page = viewer.open("samples")
    summary(viewer, COUNT)
    field = page.get_by_label("Text in prompt or response").first
    field.evaluate(TYPE_WHILE_SEARCHING)
    summary(viewer, STEPS)
    assert field.input_value() == "answer 3"
    assert viewer.params() == {"text": "answer 3"}


def test_a_histogram_is_brushed(viewer):
    page = viewer.open("samples")
    bars = page.locator('[data-column="step"] .bars')
    bars.wait_for()
    viewer.drag(bars, 1.5 / STEPS, 3.5 / STEPS)
    summary(viewer, 3 * 8)
    assert viewer.params() == {"step": "2..4"}
    assert bars.locator("i.lit").count() == 3


@pytest.mark.slow
def test_samples_are_sorted_paged_and_walked_by_keys(viewer):
    page = viewer.open("samples")
    page.locator("table.samples").wait_for()
    for order in ("descending", "ascending"):
        page.locator("thead").get_by_role("button", name="score").click()
        page.locator(f'th[aria-sort="{order}"]', has_text="score").wait_for()
    page.locator('.listed[aria-busy="false"]').wait_for()
    assert page.locator(".score b").first.text_content() == "0.1"
    for key in "jjk":
        page.keyboard.press(key)
    page.wait_for_function("document.activeElement.dataset.row === '0'")
    page.keyboard.press("Enter")
    await_text(page.locator("h1"), "Step 1")
    assert viewer.params()["id"] == "step_000001:0"
    page.keyboard.press("j")
    page.wait_for_function("location.hash.includes('step_000001%3A1')")
    page.keyboard.press("u")
    page.locator("table.samples").wait_for()
    assert viewer.params() == {"sort": "score", "direction": "up"}


def test_what_is_selected_is_exported(viewer):
    page = viewer.open("samples", step="2", source="words")
    summary(viewer, GROUP)
    with page.expect_download() as waited:
        page.get_by_role("link", name="Export JSONL").click()
    rows = [json.loads(line) for line in Path(waited.value.path()).read_text().splitlines()]
    assert [row["response"] for row in rows] == [f"Answer {number} of step 2" for number in range(4, 8)]
    with page.expect_download() as waited:
        page.get_by_role("link", name="CSV").click()
    assert len(Path(waited.value.path()).read_text().splitlines()) == 1 + GROUP


def test_a_sample_shows_turns_score_and_exact_values_of_its_tokens(viewer):
    page = viewer.open("sample", id="step_000003:1")
    await_text(page.locator(".scored"), "answer 7, expected 8")
    assert page.locator(".big-score b").text_content() == "0.3"
    assert page.locator(".turn .role").all_text_contents() == ["user", "assistant", "tool", "assistant"]
    texts = ["what is 0", "seven answer call", "result", "seven end"]
    assert page.locator(".turn pre").all_text_contents() == texts
    expected = {"advantages": 1.5, "rollout_log_probs": -0.2, "old_log_probs": 0.3}
    expected |= {"difference": 0.5, "ratio": math.exp(0.5), "policy_version": 3}
    tokens = page.locator(".tokens > span")
    tokens.nth(2).hover()
    for name, value in expected.items():
        shown = page.locator(f'[data-value="{name}"]').text_content()
        assert float(shown) == pytest.approx(value, abs=1e-6), name
    assert page.locator('[data-value="response_mask"]').text_content() == "yes"
    await_text(page.locator(".note"), re.compile("entropy.*training recomputes log-probs"))


TINTED = dict.fromkeys(("ratio", "difference", "mask", "version"), dict.fromkeys((2, 3, 4, 6, 7), "plus"))
TINTED["advantage"] = {2: "plus", 3: "minus", 4: "plus", 7: "plus"}
TINTED["log-prob"] = dict.fromkeys((2, 3, 4, 6), "plus")


@pytest.mark.parametrize("colour", slow_but(["ratio", "advantage"], TINTED))
def test_tokens_are_coloured_by_what_is_chosen(viewer, colour):
    page = viewer.open("sample", id="step_000003:1")
    page.get_by_role("combobox", name="Colour").select_option(colour)
    page.wait_for_function("colour => location.hash.includes(colour)", arg=f"colour={colour}")
    styles = page.locator(".tokens > span").evaluate_all("all => all.map((e) => e.style.background)")
    found = {place: re.search(r"--(plus|minus)", style)[1] for place, style in enumerate(styles) if style}
    assert found == TINTED[colour]


def test_tokens_are_walked_by_keys_and_linked(viewer):
    page = viewer.open("sample", id="step_000003:1")
    page.locator(".tokens").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    page.wait_for_function("location.hash.includes('token=1')")
    await_text(page.locator(".token-text"), '"is"')
    page.reload()
    await_text(page.locator(".token-text"), '"is"')


def test_a_group_stands_side_by_side_and_a_prompt_is_followed(viewer):
    page = viewer.open("sample", id="step_000003:1")
    cards = page.locator(".side-by-side .card")
    cards.first.wait_for()
    answers = [f"Answer {number} of step 3" for number in range(GROUP)]
    assert cards.locator("pre").all_text_contents() == answers
    assert page.locator(".side-by-side [aria-current]").text_content().startswith("#1")
    page.get_by_role("img", name=re.compile("Mean score of this prompt. mean score: 0.1 to 0.6")).wait_for()
    steps = page.locator(".history .n:first-child").all_text_contents()
    assert steps == [f"step {step}" for step in range(1, STEPS + 1) for _ in range(GROUP)]
    page.locator(".history a").last.click()
    await_text(page.locator("h1"), f"Step {STEPS}")
    cards.nth(0).click()
    page.wait_for_function("location.hash.includes('step_000006%3A0')")


@pytest.mark.slow
def test_hostile_texts_are_shown_and_not_obeyed(viewer):
    page = viewer.open("samples", "hostile", sort="score", direction="up")
    page.locator("table.samples").wait_for()
    assert page.locator(".words a").count() == 50
    await_text(page.locator(".asked").nth(0), "<script>window.hit = 1</script>")
    for row in range(0, len(TEXTS), 6):
        viewer.open("sample", "hostile", id=f"step_000001:{row}")
        page.locator(".turn.assistant").first.wait_for()
    for text, shown in (("nul \0 within", "␀"), ("\u202e right to left", "U+202E")):
        viewer.open("sample", "hostile", id=f"step_000001:{TEXTS.index(text)}")
        await_text(page.locator(".turn .hidden-character"), shown)
    assert page.evaluate("window.hit") is None
    obeyed = page.locator("main").locator("script, img, iframe, object, base, meta, style, link, svg")
    assert obeyed.count() == 0


@pytest.mark.slow
def test_a_large_group_is_turned_over_page_by_page(browser, tmp_path):
    run, count = write_viewed(tmp_path / "run", steps=1), 2 * sample.GROUP + 5
    texts = {"response_text": [f"answer number {number}" for number in range(count)]}
    RunFolder(run).write_samples(1, many_samples(count) | texts)
    with viewing(run) as client, browser.new_page() as page:
        page.set_default_timeout(20_000)
        viewer = Viewer(page, client, tmp_path)
        viewer.open("sample", "run", id="step_000001:0")
        answers = page.locator(".side-by-side .card")
        await_text(page.locator(".pager"), f"responses 1 – {sample.GROUP} of {count}")
        assert answers.count() == sample.GROUP
        for first in (sample.GROUP + 1, count - sample.GROUP + 1):
            page.get_by_role("button", name="Later").click()
            await_text(page.locator(".pager"), f"responses {first} – ")
        assert page.get_by_role("button", name="Later").is_disabled()
        await_text(answers.last, f"answer number {count - 1}")
        answers.last.click()
        await_text(page.locator(".side-by-side [aria-current]"), f"answer number {count - 1}")
        page.keyboard.press("k")
        await_text(page.locator(".side-by-side [aria-current]"), f"answer number {count - 2}")
        assert viewer.wrong == []
