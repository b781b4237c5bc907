"""The site builds without a warning, the search works, and generated pages are complete."""

import ast
import json
import re
from pathlib import Path

import pytest

from docs import build, failures, migrate_pages, tutorials
from docs.entries import ROOT
from docs.figures import figures
from docs.nav import NAV
from docs.pages import Page, pages
from tandem.cli.main import COMMANDS
from tandem.config.explain import COMMANDS as CONFIGS
from tandem.config.schema import keys
from tandem.migrate import environment, openrlhf, trl_table

QUESTIONS = {
    name: [f"{page}.html" for page in pages_of.split()]
    for name, pages_of in {
        "install": "quickstart index", "vllm": "rollout-engines", "docker": "deployment", "trl": "from-trl",
        "reward function": "rewards tutorials/own-reward extend/reward", "export": "commands",
        "resume": "reading-a-run config/train-trainer", "learning rate": "questions/basics",
        "out of memory": "questions/debugging large-models failures", "unknown key": "failures messages",
        "what is grpo": "questions/basics algorithms/advantages/grpo", "slurm": "deployment examples/cluster",
        "kl penalty": "questions/basics algorithms/kl/k1", "hangs": "questions/debugging failures",
        "train_batch_size": "config/train-data", "lora": "large-models config/train-actor-rollout-ref-model",
        "ppo_mini_batch_size": "config/train-actor-rollout-ref-actor",
        "multiple gpus": "multi-node support tutorials/two-processes",
        "entropy collapse": "questions/basics failures reading-a-run",
        "reward model": "tutorials/reward-model examples/reward_model",
        "pass@k": "questions/basics algorithms/parts/pass_at_k",
        "custom algorithm": "your-own-algorithm tutorials/own-algorithm",
    }.items()
}  # fmt: skip
"""Search terms of a newcomer; one of the pages must be among the first ten results."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.build([], tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def made() -> dict[str, Page]:
    return pages([])


@pytest.mark.slow
def test_it_builds_and_every_page_is_within_reach(site):
    """The build itself fails for dead links and for files fetched from other servers."""
    assert not (site.parent / "pages" / "docs").exists()
    first = (site / "index.html").read_text("utf-8")
    reached = {name for name in re.findall(r'href="\.?/?([\w/-]+\.html)', first)}
    assert {"quickstart.html", "commands.html", "questions/index.html"} <= reached
    assert "unpkg.com" not in first
    assert '<svg viewBox="0 0' in (site / "concepts" / "index.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_finds(site, question):
    """Uses the index of the site's search: sections with all words; words in titles count most."""
    items = json.loads((site / "search.json").read_text("utf-8"))["items"]
    words = [word for word in question.lower().split() if word not in ("what", "is")]

    def score(item: dict[str, str]) -> float:
        title, text = item["title"].lower(), f"{item['title']} {item['text']}".lower()
        if not all(word in text for word in words):
            return 0.0
        found = sum(20.0 * (word in title) + text.count(word) ** 0.5 for word in words)
        return found / (1 + len(text) / 20_000)

    ranked = sorted(items, key=score, reverse=True)
    best = list(dict.fromkeys(item["location"].partition("#")[0] for item in ranked if score(item)))
    assert set(best[:10]) & set(QUESTIONS[question]), best[:10]


def test_a_link_that_leads_nowhere_and_what_is_fetched_are_faults(tmp_path):
    links = '<a href="b.html#x">b</a><a href="c.html">c</a><script src="https://x/y.js"></script>'
    (tmp_path / "a.html").write_text(links)
    right = '<a href="mailto:a@b">m</a><a href="https://ok">o</a>'
    (tmp_path / "b.html").write_text(f'<p id="z">| a | b |</p>{right}')
    assert sorted(build.faults(tmp_path)) == [
        "a.html: fetches https://x/y.js",
        "a.html: the target of this link does not exist: c.html",
        "a.html: this anchor does not exist: b.html#x",
        "b.html: Markdown that was not converted: '| a | b |'",
    ]


def test_the_navigation_names_each_page_once_and_takes_what_it_does_not_know(made):
    named = list(build._named(NAV))
    assert len(named) == len(set(named))
    more = build.navigation(made | {"new-page.md": Page("docs/new-page.md", "# New")})
    assert "new-page.md" in json.dumps(more)


def test_every_command_has_a_section_with_its_help(made):
    page = made["commands.md"].text
    sections = re.findall(r"^## `tandem ([\w-]+)`$", page, re.M)
    assert sorted(sections) == sorted(COMMANDS)
    assert page.count("example:\n") == len(COMMANDS)


def test_every_key_of_every_command_has_a_place(made):
    train = "".join(page.text for place, page in made.items() if place.startswith("config/train-"))
    for command, root in CONFIGS.items():
        text = train if command == "tandem train" else made[f"config/{command.split()[1]}.md"].text
        assert [name for name in keys(root) if f"{{ #{name} }}" not in text] == []
    assert "- used only if `actor_rollout_ref" not in train  # conditions are shown as words, not as code


def test_every_error_that_is_raised_by_name_is_on_the_page(made):
    """The test finds the messages in another way: the first text after `Error(` in the source."""
    page = made["messages.md"].text
    kinds = "|".join(sorted(failures.kinds()))
    own = [
        ast.literal_eval(found)
        for path in sorted((ROOT / "tandem").rglob("*.py"))
        for found in re.findall(rf'raise (?:{kinds})\(\s*("(?:[^"\\]|\\.)+")\s*[,)]', path.read_text("utf-8"))
    ]
    assert len(own) > 100
    assert [text for text in own if failures.escaped(text) not in page] == []


def test_what_goes_wrong_explains_messages_that_there_are():
    text = (ROOT / "docs" / "failures.md").read_text("utf-8")
    heads = re.findall(r"^### `(.+)`$", text, re.M)
    known = {" ".join(message.text.split()) for message in failures.messages()}
    assert len(heads) >= 40
    assert [head for head in heads if head not in known] == []


def test_a_figure_is_what_its_result_says():
    found = [figure for page in (ROOT / "docs").rglob("*.md") for figure in figures(page.read_text("utf-8"))]
    assert len(found) >= 30
    assert [(figure, figure.value) for figure in found if not figure.is_right] == []
    (wrong,) = figures("1.75 <!-- = grpo_step_vs_trl.json rows[mode=equal,precision=fp32].ratio -->")
    assert not wrong.is_right


COUNTS = {"basics": 30, "advanced": 20, "systems": 15, "coding": 10, "debugging": 10}


@pytest.mark.parametrize("page", COUNTS)
def test_each_question_is_answered_and_leads_to_code(page):
    _, *parts = (ROOT / "docs" / "questions" / f"{page}.md").read_text("utf-8").split("\n## ")
    assert len(parts) >= COUNTS[page]
    for part in parts:
        question, answer = part.split("\n", 1)
        prose = re.sub(r"```.*?```", "", answer, flags=re.S)
        assert 250 >= len(prose.split()) >= (60 if page != "coding" else 15), (question, len(prose.split()))
        assert re.search(r"^Code: .*\]\(|^Code: `", answer, re.M), question
        assert "```python" in answer or page != "coding", question


def test_tutorials_end_in_a_curve():
    results = json.loads(tutorials.RESULTS.read_text())
    for name in tutorials.TUTORIALS:
        page = ROOT / ("README.md" if name == "first-run" else f"docs/tutorials/{name}.md")
        assert f"figures/{name}.svg" in page.read_text("utf-8")
        assert (tutorials.FIGURES / f"{name}.svg").read_text("utf-8") == tutorials.draw(results[name])


VERL = next((Path(__file__).parents[2] / ".peers" / "verl" / "lib").glob("python3*/site-packages/verl"), None)
READ = re.compile(r"(?:environ(?:\.get)?[\[(]|getenv\()\s*[\"']([A-Z][A-Z_0-9]+)[\"']")


def test_every_setting_has_a_line():
    page = migrate_pages.from_trl()
    for table in trl_table.TABLES.values():
        assert all(f"| `{name}` |" in page for name in table)
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    assert all(line.count(" | ") == 2 and not line.endswith("|  |") for line in lines)
    page = migrate_pages.from_openrlhf()
    assert all(f"| `{name}` |" in page for name in openrlhf.TABLE)
    page = migrate_pages.verl_environment()
    assert all(f"| `{name}` |" in page for name in environment.VARIABLES)


@pytest.mark.verl
@pytest.mark.skipif(VERL is None, reason="verl is not installed; run make peers")
def test_every_variable_that_verl_reads_has_a_line():
    assert VERL is not None
    found = {name for path in VERL.rglob("*.py") for name in READ.findall(path.read_text(errors="replace"))}
    assert found - environment.VARIABLES.keys() == set()
