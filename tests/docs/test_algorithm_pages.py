"""Tests that the generated pages of algorithms match the code, and that their links are valid."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from docs import equations, generate
from docs.docstring import LABELS, parse
from docs.equations import Check
from docs.kinds import NEEDS
from docs.probe import level
from tandem.algorithms.registry import AdvantageSpec, PolicyLossSpec, advantage_estimator, declared
from tandem.config.load import load_train_config
from tandem.config.schema import value_at
from tests.support.runs import lab

__all__ = ["lab"]

ENTRIES = list(generate.entries())
REGISTERED = [entry for entry in ENTRIES if entry.spec is not None]


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return equations.collected()


def explained(scores: Tensor, mask: Tensor, *, scale: float = 1.0) -> None:  # noqa: D417
    """Scores times a number. It
    goes on.

    Equation (s a score,
    k the scale):

        A = s * k        (always)
        B = 0

    A further word,
    and what it means:

        code

    Args:
        scores, mask: (N) of
            each token.
        scale: k, > 0.

    Returns:
        Two
        things.

    Raises:
        ConfigError: never.

    When to use: seldom,
    if at all.
    Watch: `a/b` falls; `c/d` rises.

    Cost: nothing.
    Source: Somebody 1999, https://arxiv.org/abs/1234.56789, eq. 1;
    others 2001 (Them), https://arxiv.org/abs/2345.67890.
    """  # noqa: D205 (the docstring is test data)


def test_a_docstring_is_taken_apart():
    found = parse(explained)
    assert found.summary == "Scores times a number. It goes on."
    assert (found.symbols, found.equation) == ("s a score, k the scale", "A = s * k        (always)\nB = 0")
    assert found.notes == ["A further word, and what it means:\n\n    code"]
    scores = "(N) of each token."
    assert found.arguments == {"scores": scores, "mask": scores, "scale": "k, > 0."}
    assert (found.returns, found.raises) == ("Two things.", "ConfigError: never.")
    said = [found.labelled[label] for label in ("When to use", "Watch", "Cost")]
    assert said == ["seldom, if at all.", "`a/b` falls; `c/d` rises.", "nothing."]
    assert generate.paper(found.labelled["Source"]) == (
        "[Somebody 1999](https://arxiv.org/abs/1234.56789); [others 2001 (Them)](https://arxiv.org/abs/2345.67890)"
    )


def test_an_equation_needs_no_symbols_and_a_summary_may_be_followed_by_one():
    def titled() -> None:
        """One.

        Equation, of each:

            A = 1
        """

    def untitled() -> None:
        """One:

            A = 1

        Two.
        """  # noqa: D415 (the docstring is test data)

    assert (parse(titled).equation, parse(titled).symbols) == ("A = 1", "")
    assert (parse(untitled).summary, parse(untitled).equation) == ("One:", "A = 1")
    assert parse(untitled).notes == ["Two."]


def test_every_algorithm_has_a_page_and_nothing_else_has():
    assert set(generate.pages()) == {"README.md", *(entry.path for entry in ENTRIES)}


@pytest.mark.slow
def test_every_link_leads_to_a_page_or_a_file(checks):
    built = generate.pages() | {equations.PAGE: equations.page(ENTRIES, checks)}
    links = [
        (path, Path(os.path.normpath((generate.FOLDER / path).parent / target)))
        for path, text in built.items()
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        if not target.startswith("http")
    ]
    pages = {generate.FOLDER / path for path in built}
    assert len(links) > 3 * len(ENTRIES)
    assert [(path, target) for path, target in links if target not in pages and not target.exists()] == []


def test_every_algorithm_says_when_to_use_it_what_to_watch_and_what_it_costs():
    said = {entry.name: entry.docstring.labelled.keys() for entry in ENTRIES}
    assert {name for name, labels in said.items() if not set(LABELS) <= labels} == set()
    assert [entry.name for entry in ENTRIES if "`" not in entry.docstring.labelled["Watch"]] == []


@pytest.mark.slow
def test_every_algorithm_has_an_equation_and_a_test_that_holds_it_to_that(checks):
    assert [entry.path for entry in ENTRIES if not entry.docstring.equation] == []
    found = equations.by_page(ENTRIES, checks)
    assert [path for path, of in found.items() if all(check.verl for check in of)] == []


@pytest.mark.slow
def test_marks_are_read_with_the_parameters_of_their_test(checks):
    """Marks may use a name, an alias or the + of a straight-through form, alone or in a list."""
    found = {path: {c.test for c in of} for path, of in equations.by_page(ENTRIES, checks).items()}
    kl = {c.page for c in checks if c.test == "test_values" and c.file == "tests/algorithms/test_kl.py"}
    assert {"kl/k3", "kl/k3+", "kl/low_var_kl", "kl/low_var_kl+"} <= kl
    assert "test_values" in found["kl/k3.md"] and "test_values" not in found["kl/full.md"]
    assert "test_maxrl_by_hand" in found["advantages/maxrl.md"] - found["advantages/opo.md"]
    losses = {path for path, tests in found.items() if "test_values_and_gradients" in tests}
    assert losses == {e.path for e in REGISTERED if e.kind.folder == "policy_losses"} - {
        "policy_losses/bypass_mode.md"
    }
    assert {c.where for c in checks if c.file == "tests/models/test_exact_heads.py"} == {"", "on a GPU"}
    verl = {check.test for check in checks if check.verl}
    assert len(verl) == 4 and all("verl" in check.file for check in checks if check.verl)


def test_a_mark_that_names_no_page_and_one_that_cannot_be_read_are_refused(tmp_path):
    astray = Check(page="kl/k9", file="tests/test_a.py", test="test_b", summary="", where="", verl=False)
    with pytest.raises(ValueError, match=r"tests/test_a.py::test_b .*'kl/k9'"):
        equations.by_page(ENTRIES, [astray])
    (tmp_path / "test_own.py").write_text(
        "import pytest\n@pytest.mark.equation('kl/{kind}')\ndef test_nothing(): ...\n"
    )
    with pytest.raises(RuntimeError, match="KeyError: 'kind'"):
        equations.collected(tmp_path)


def test_every_registered_name_has_a_page_and_a_row():
    made = generate.pages()
    index = made["README.md"]
    assert {"gae", "grpo", "vanilla"} <= {entry.name for entry in REGISTERED}
    for entry in ENTRIES:
        assert f"]({entry.path})" in index
        assert entry.path in made
        for alias in entry.aliases:
            assert f"`{alias}`" in made[entry.path]
    for entry in REGISTERED:
        assert entry.docstring.equation in made[entry.path]
        for column in entry.spec.columns:
            assert f"| `{column}` |" in made[entry.path]


def test_what_stands_in_a_row():
    rows = {row.split("](")[0]: row for row in generate.pages()["README.md"].splitlines() if "](" in row}
    gae, rloo = rows["| [`gae`"], rows["| [`rloo`"]
    assert f"| advantage estimator | {NEEDS['values']} | token |" in gae
    assert "[Schulman et al. 2016](https://arxiv.org/abs/1506.02438)" in gae
    assert f"| advantage estimator | {NEEDS['group']} | sequence |" in rloo


def losses_of_sequences(log_probs: Tensor, response_mask: Tensor, offsets: Tensor):
    total = torch.segment_reduce(log_probs * response_mask, "sum", offsets=offsets)
    return torch.repeat_interleave(total, offsets.diff()), {}


def losses_of_the_batch(log_probs: Tensor):
    return log_probs - log_probs.mean(), {}


def losses_of_tokens(log_probs: Tensor, advantages: Tensor):
    return -log_probs * advantages, {}


@pytest.mark.parametrize(
    ("loss", "found"),
    [(losses_of_tokens, "token"), (losses_of_sequences, "sequence"), (losses_of_the_batch, "batch")],
)
def test_how_far_a_loss_reaches_is_found_by_running_it(loss, found):
    assert level(declared(PolicyLossSpec, "loss", loss), {}) == found


def test_whether_an_estimator_tells_tokens_apart_is_found_by_running_it():
    def first_token_only(token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor):
        advantages = torch.zeros_like(token_level_rewards)
        advantages[offsets[1:] - 1] = 1.0
        return advantages, advantages

    assert level(declared(AdvantageSpec, "own", first_token_only), {}) == "token"
    assert level(advantage_estimator("grpo"), {}) == "sequence"


def other(value: object) -> object:
    """Return another valid value of an option."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else (value or 1.0) * 0.5
    return value


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.kind.keys], ids=lambda entry: entry.name)
def test_the_snippet_is_a_config(entry, lab, tmp_path):
    file = tmp_path / "snippet.yaml"
    file.write_text(generate.snippet(entry))
    beside = lab.overrides(tmp_path / "run")[1:]  # without the estimator
    estimator = [] if entry.kind.folder == "advantages" else ["algorithm.adv_estimator=grpo"]
    config = load_train_config(str(file), [*beside, *estimator]).config
    for name, value in entry.settings.items():
        assert value_at(config, name) in (value, (value,))


WITH_OPTIONS = [entry for entry in REGISTERED if entry.kind.folder in ("advantages", "policy_losses")]


@pytest.mark.parametrize("entry", WITH_OPTIONS, ids=lambda entry: entry.name)
def test_an_option_set_at_its_key_arrives(entry, lab, tmp_path):
    """Checks the options in the worker that calls the function."""
    wanted = {name: (option, other(value)) for name, (option, value) in generate.options_of(entry).items()}
    words = [f"{name}={generate._value(value)}" for name, (_, value) in wanted.items()]
    words += [f"{n}={generate._value(v)}" for n, v in entry.settings.items() if n not in wanted]
    trainer = lab.trainer(tmp_path / "run", *words)
    trainer.shutdown()
    batch, actor = (group._workers._worker for group in (trainer.roles.batch, trainer.roles.actor))
    options = (
        batch.options if entry.kind.folder == "advantages" else actor.parts["actor"].loss.terms[0].options
    )
    assert options == dict(wanted.values())
