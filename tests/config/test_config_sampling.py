"""The keys that determine how responses are sampled, and how they become `SamplingParams`."""

from typing import get_args

import pytest

from tandem.config.rollout import RolloutConfig
from tandem.protocol import SamplingParams
from tandem.protocol.rollout import LogprobsMode
from tandem.trainer.sampling_params import sampling

SHAPE = {
    "top_k": 7, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3,
    "frequency_penalty": -0.4, "min_tokens": 3,
}  # fmt: skip


def test_the_defaults_change_nothing(load):
    params = sampling(load().config, (2,))
    assert params == SamplingParams(max_tokens=params.max_tokens, stop_token_ids=(2,), seed=params.seed)
    assert not params.reshapes


@pytest.mark.parametrize("validation", [False, True])
def test_each_key_of_the_distribution_reaches_training_or_validation(load, validation):
    shape = (f"{'V' if validation else 'R'}.{name}={value}" for name, value in SHAPE.items())
    given = "V.do_sample=true V.temperature=0.6 R.temperature=0.9 VAL R.stop=[END] trainer.seed=5"
    config = load(given, *shape).config
    mine, other = (sampling(config, (2, 9), validation=which) for which in (validation, not validation))
    assert {name: getattr(mine, name) for name in SHAPE} == SHAPE
    assert not other.reshapes
    for params, temperature in ((mine, 0.6 if validation else 0.9), (other, 0.9 if validation else 0.6)):
        assert params.temperature == temperature
        assert (params.stop, params.stop_token_ids, params.seed) == (("END",), (2, 9), 5)


def test_greedy_validation_is_penalised_too(load):
    params = sampling(load("VAL V.repetition_penalty=1.3").config, (), validation=True)
    assert (params.temperature, params.repetition_penalty) == (0.0, 1.3)


def test_ignore_eos_leaves_the_stop_texts(load):
    config = load("R.ignore_eos=true R.stop=[END]").config
    for validation in (False, True):
        params = sampling(config, (2, 9), validation=validation)
        assert (params.stop_token_ids, params.stop) == ((), ("END",))


def test_the_modes_are_the_engines():
    field = RolloutConfig.model_fields["logprobs_mode"].annotation
    assert get_args(field) == get_args(LogprobsMode)
