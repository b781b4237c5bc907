from __future__ import annotations

import math
import pickle

import pytest

from tandem.errors import ConfigError
from tandem.protocol import SamplingParams

WRONG = [
    ("temperature", -0.1, "finite and >= 0"),
    ("temperature", math.nan, "finite and >= 0"),
    ("temperature", math.inf, "finite and >= 0"),
    ("top_k", -2, ">= -1"),
    ("top_p", 0.0, "in (0, 1]"),
    ("top_p", 1.01, "in (0, 1]"),
    ("top_p", math.nan, "in (0, 1]"),
    ("min_p", -0.1, "in [0, 1]"),
    ("min_p", 1.5, "in [0, 1]"),
    ("min_p", math.nan, "in [0, 1]"),
    ("repetition_penalty", 0.0, "finite and > 0"),
    ("repetition_penalty", math.nan, "finite and > 0"),
    ("repetition_penalty", math.inf, "finite and > 0"),
    ("presence_penalty", 2.1, "in [-2, 2]"),
    ("presence_penalty", math.nan, "in [-2, 2]"),
    ("frequency_penalty", -2.1, "in [-2, 2]"),
    ("max_tokens", 0, ">= 1"),
    ("min_tokens", -1, "0 to max_tokens=16"),
    ("min_tokens", 17, "0 to max_tokens=16"),
    ("stop", ("a", ""), "non-empty strings"),
    ("logit_bias", ((3, math.nan),), "finite"),
    ("logit_bias", ((3, math.inf),), "finite"),
    ("logit_bias", ((3, 1.0), (3, 2.0)), "each token once"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_values_out_of_range_are_refused_by_name(name, value, expected):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert repr(caught.value.got) == repr(value)
    assert expected in caught.value.expected


NEUTRAL = dict(
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    min_tokens=0,
    logit_bias=(),
)
CUTS = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}
EDITS = {
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 1,
    "logit_bias": ((1, 0.5),),
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_reshapes_the_distribution(temperature):
    """Truncation does not change a greedy token's log-prob, changes of the logits do."""
    plain = SamplingParams(temperature=temperature, **NEUTRAL)
    assert not (plain.reshapes or plain.truncated or plain.penalised)
    for name, value in (CUTS | EDITS).items():
        params = SamplingParams(**{**NEUTRAL, "temperature": temperature, name: value})
        cuts = name in CUTS and temperature > 0
        assert params.truncated == cuts
        assert params.reshapes == (cuts or name in EDITS)
        assert params.penalised == name.endswith("penalty")


def test_parameters_are_values():
    params = SamplingParams(logit_bias=((1, 0.5),), stop=("a",))
    assert len({params, SamplingParams(logit_bias=((1, 0.5),), stop=("a",))}) == 1
    assert pickle.loads(pickle.dumps(params)) == params
