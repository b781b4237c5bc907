"""The keys that determine how responses are sampled, and how they become `SamplingParams`."""

from __future__ import annotations

from typing import get_args

import pytest

from tandem.config.rollout import RolloutConfig
from tandem.protocol import SamplingParams
from tandem.protocol.rollout import LogprobsMode
from tandem.trainer.sampling_params import sampling

R = "actor_rollout_ref.rollout"
V = f"{R}.val_kwargs"
SHAPE = {
    "top_k": 7,
    "top_p": 0.8,
    "min_p": 0.05,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.4,
    "min_tokens": 3,
}


def test_the_defaults_change_nothing(load):
    params = sampling(load().config, (2,))
    assert params == SamplingParams(max_tokens=params.max_tokens, stop_token_ids=(2,), seed=params.seed)
    assert not params.reshapes


@pytest.mark.parametrize("validation", [False, True])
def test_each_key_of_the_distribution_reaches_training_or_validation(load, validation):
    at = V if validation else R
    words = [f"{V}.do_sample=true", f"{V}.temperature=0.6", f"{R}.temperature=0.9"]
    words += ["data.val_files=${data.train_files}", f"{R}.stop=[END]", "trainer.seed=5"]
    config = load(*words, *(f"{at}.{name}={value}" for name, value in SHAPE.items())).config
    mine, other = (sampling(config, (2, 9), validation=which) for which in (validation, not validation))
    assert {name: getattr(mine, name) for name in SHAPE} == SHAPE
    assert not other.reshapes
    for params, temperature in ((mine, 0.6 if validation else 0.9), (other, 0.9 if validation else 0.6)):
        assert params.temperature == temperature
        assert (params.stop, params.stop_token_ids, params.seed) == (("END",), (2, 9), 5)


def test_greedy_validation_is_penalised_too(load):
    config = load("data.val_files=${data.train_files}", f"{V}.repetition_penalty=1.3").config
    params = sampling(config, (), validation=True)
    assert (params.temperature, params.repetition_penalty) == (0.0, 1.3)


def test_ignore_eos_leaves_the_stop_texts(load):
    config = load(f"{R}.ignore_eos=true", f"{R}.stop=[END]").config
    for validation in (False, True):
        params = sampling(config, (2, 9), validation=validation)
        assert (params.stop_token_ids, params.stop) == ((), ("END",))


@pytest.mark.parametrize("at", [R, V])
def test_min_tokens_beyond_the_longest_response(load, errors, at):
    words = ("data.max_response_length=20", "data.val_files=${data.train_files}")
    (error,) = errors(*words, f"{at}.min_tokens=21").values()
    assert error.field == f"{at}.min_tokens"
    assert (error.got, error.expected) == (21, "at most data.max_response_length=20")
    assert load(*words, f"{at}.min_tokens=20").notices == ()


def test_min_tokens_without_anything_that_stops(load):
    notice = f"{R}.min_tokens: no effect; used only if {R}.ignore_eos=false, or if {R}.stop is set."
    words = (f"{R}.min_tokens=3", f"{R}.ignore_eos=true")
    assert load(*words).notices == (notice,)
    assert load(*words, f"{R}.stop=[END]").notices == ()


def test_min_p_of_a_greedy_validation(load):
    notices = load(
        "data.val_files=${data.train_files}", f"{V}.min_p=0.1", f"{V}.presence_penalty=0.1"
    ).notices
    assert notices == (
        f"{V}.min_p: no effect; used only if {V}.do_sample=true (otherwise validation is greedy).",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["processed_logits"], "training needs log-probs, not logits"),
        (["raw_logits"], "training needs log-probs, not logits"),
        (["raw_logprobs", f"{R}.temperature=0.7"], "raw log-probs ignore the temperature"),
    ],
)
def test_modes_that_training_cannot_use(errors, words, message):
    (error,) = errors(f"{R}.logprobs_mode={words[0]}", *words[1:]).values()
    assert error.field == f"{R}.logprobs_mode"
    assert error.message.startswith(message)
    assert f"{R}.logprobs_mode=processed_logprobs" in error.remedy


def test_modes_that_training_can_use(load):
    """At temperature 1, raw log-probs equal those that training computes, whatever tokens were cut."""
    assert load(f"{R}.logprobs_mode=raw_logprobs", f"{R}.top_p=0.9").notices == ()
    assert load(f"{R}.logprobs_mode=processed_logprobs", f"{R}.temperature=0.7").notices == ()


def test_the_modes_are_the_engines():
    field = RolloutConfig.model_fields["logprobs_mode"].annotation
    assert get_args(field) == get_args(LogprobsMode)
