"""Docstrings of algorithms contain what a reader needs: options, the equation and the source."""

import inspect
import re

import pytest

from docs.docstring import parse
from tandem.algorithms.aggregation import aggregate
from tandem.algorithms.bradley_terry import bradley_terry_loss
from tandem.algorithms.kl import AdaptiveKLController, apply_kl_penalty, kl_penalty
from tandem.algorithms.kl_estimators import straight_through
from tandem.algorithms.registry import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from tandem.algorithms.value_loss import clipped_value_loss

REGISTRIES = (ADVANTAGES, POLICY_LOSSES, KL_ESTIMATORS)
REGISTERED = [registry.find(name).fn for registry in REGISTRIES for name in registry.names]
PARTS = [aggregate, kl_penalty, apply_kl_penalty, AdaptiveKLController, straight_through, clipped_value_loss]


@pytest.mark.parametrize("function", [*REGISTERED, *PARTS, bradley_terry_loss], ids=lambda f: f.__name__)
def test_source_is_named(function):
    text = inspect.getdoc(function) or ""
    assert re.search(r"^Source: .+ \d{4}.*", text, re.MULTILINE), text
    assert re.search(r"https?://(arxiv\.org/abs/\d{4}\.\d{4,5}|joschu\.net)", text), text


@pytest.mark.parametrize("name", ADVANTAGES.names)
def test_when_to_use_it_what_to_watch_and_what_it_costs(name):
    text = inspect.getdoc(ADVANTAGES.find(name).fn) or ""
    assert re.findall(r"^(\w[\w ]*): \S", text, re.MULTILINE) == ["When to use", "Watch", "Cost", "Source"]


@pytest.mark.parametrize("function", REGISTERED, ids=lambda f: f.__name__)
def test_equation_and_options_are_given(function):
    text = inspect.getdoc(function) or ""
    assert re.search(r"^Equation.*?:\n\n(    .* = .*\n)+", text, re.MULTILINE | re.DOTALL), text
    parameters = inspect.signature(function).parameters.values()
    options = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert options <= parse(function).arguments.keys()
