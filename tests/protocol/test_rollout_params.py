import math
import pickle

import pytest

from tandem.errors import ConfigError
from tandem.protocol import SamplingParams

NAN, INF = math.nan, math.inf
WRONG = [
    ("temperature", "finite and >= 0", [-0.1, NAN, INF]), ("top_k", ">= -1", [-2]),
    ("top_p", "in (0, 1]", [0.0, 1.01, NAN]), ("min_p", "in [0, 1]", [-0.1, 1.5, NAN]),
    ("repetition_penalty", "finite and > 0", [0.0, NAN, INF]), ("presence_penalty", "in [-2, 2]", [2.1, NAN]),
    ("frequency_penalty", "in [-2, 2]", [-2.1]), ("max_tokens", ">= 1", [0]),
    ("min_tokens", "0 to max_tokens=16", [-1, 17]), ("stop", "non-empty strings", [("a", "")]),
    ("logit_bias", "finite", [((3, NAN),), ((3, INF),)]),
    ("logit_bias", "each token once", [((3, 1.0), (3, 2.0))]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "expected", "values"), WRONG)
def test_values_out_of_range_are_refused_by_name(name, expected, values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.field == name and repr(caught.value.got) == repr(value)
        assert expected in caught.value.expected


NEUTRAL = {
    **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0},
    **{"frequency_penalty": 0.0, "min_tokens": 0, "logit_bias": ()},
}
CUTS = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}
EDITS = {
    **{"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.5},
    **{"min_tokens": 1, "logit_bias": ((1, 0.5),)},
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_reshapes_the_distribution(temperature):
    plain = SamplingParams(temperature=temperature, **NEUTRAL)
    assert not (plain.reshapes or plain.truncated or plain.penalised)
    for name, value in (CUTS | EDITS).items():
        params = SamplingParams(**{**NEUTRAL, "temperature": temperature, name: value})
        cuts = name in CUTS and temperature > 0
        assert params.truncated == cuts and params.reshapes == (cuts or name in EDITS)
        assert params.penalised == name.endswith("penalty")


def test_parameters_are_values():
    params = SamplingParams(logit_bias=((1, 0.5),), stop=("a",))
    assert len({params, SamplingParams(logit_bias=((1, 0.5),), stop=("a",))}) == 1
    assert pickle.loads(pickle.dumps(params)) == params
