import copy
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.models.loading import load_policy
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged, SamplingParams
from tandem.watch.checks import Facts
from tandem.watch.gap import (
    FINGERPRINT,
    LIMITS,
    SAMPLED,
    UNTRUNCATED,
    add_evidence,
    add_rollout_gap,
    difference_limit,
    fingerprint,
    gap_columns,
)
from tandem.watch.trust import Cause, Evidence, diagnose, pearson, sentence
from tandem.watch.watch import Watch
from tandem.workers.losses import ActorLoss
from tandem.workers.samples import requests_of, rollout_batch
from tests.workers import roles

PLAIN = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
CUT = SamplingParams(temperature=1.0, max_tokens=6, seed=3, top_p=0.8)


def facts(params=PLAIN):
    return Facts(params, 1.0, prompts=12, updates=1, recompute_old=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return roles.make_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture
def worker(folder, tmp_path):
    config = roles.make_config(folder, "actor_rollout_ref.rollout.name=hf", run=tmp_path)
    return roles.make_actor(config, "actor", "rollout")


def sampled(module, params=PLAIN, version=0):
    """Return the batch that a rollout worker makes of what an engine with these weights generates."""
    engine = HFEngine(device=torch.device("cpu"), max_length=32)
    engine.update_weights(SharedModule(module), version)
    prompts = roles.make_prompts(12)
    requests = requests_of(prompts, 2, params, longest=32)
    samples, table = generate(engine, requests), prompts.repeat(2)
    return rollout_batch(table, requests, samples, dtype=torch.float64, reshaped=params.reshapes)


def read(worker, batch, params=PLAIN):
    """Return the metrics of a step and the causes that the worker and the controller's watch find."""
    said: list[str] = []
    worker.take_observed()
    worker.compute_log_prob(batch)
    watch = Watch(12, lambda name, sentence, step: said.append(sentence))
    raw = worker.take_observed().to_floats()
    metrics = watch.check_samples(1, raw, facts(params))
    assert watch.check_samples(2, raw, facts(params)) == metrics and said == list(watch.named.values())
    return metrics, {Cause[name.upper()]: text for name, text in watch.named.items()}


def module_of(worker, dtype=torch.float64):
    return load_policy(worker._config.actor_rollout_ref.model.path, dtype=dtype)


def test_nothing_is_named_where_the_engines_agree(worker):
    metrics, named = read(worker, sampled(module_of(worker)))
    assert not named
    assert metrics["rollout/log_prob_diff_max"] < 1e-9
    assert metrics["rollout/log_prob_diff_limit"] == 1e-7
    assert metrics["rollout/prob_pearson"] == pytest.approx(1, abs=1e-9)
    assert metrics["rollout/version_lag"] == metrics["rollout/changed_samples"] == 0
    assert not any("moment" in name for name in metrics)


def test_stale_weights(worker):
    batch = sampled(module_of(worker))
    learnt = roles.with_log_probs(worker, batch)
    for _ in range(2):
        worker.update_actor(learnt)
    metrics, named = read(worker, batch)
    assert set(named) == {Cause.STALE}
    assert "stale weights, 2 updates behind" in named[Cause.STALE]
    assert metrics["rollout/version_lag"] == 2


def test_truncated_sampling_without_the_log_probs_before_it(worker):
    batch = sampled(module_of(worker), CUT)
    metrics, named = read(worker, batch, CUT)
    assert not named and metrics["rollout/log_prob_diff_max"] < 1e-9
    assert metrics["rollout/untruncated_missing"] == 0
    nothing = batch.ragged(UNTRUNCATED)
    batch.batch[UNTRUNCATED] = nothing.with_values(torch.full_like(nothing.values, torch.nan))
    metrics, named = read(worker, batch, CUT)
    assert set(named) == {Cause.RESHAPED}
    assert metrics["rollout/untruncated_missing"] == 1
    assert metrics["rollout/log_prob_diff_raised"] == pytest.approx(metrics["rollout/log_prob_diff_mean"])


def test_an_engine_that_cuts_tokens_unasked_is_told_by_the_sign(worker):
    batch = sampled(module_of(worker), CUT)
    del batch.batch[UNTRUNCATED]
    _, named = read(worker, batch, PLAIN)
    assert set(named) == {Cause.RESHAPED} and "top_p=1" in named[Cause.RESHAPED]
    warm = SamplingParams(temperature=1.5, max_tokens=6, seed=3)
    _, named = read(worker, sampled(module_of(worker), warm), warm)
    assert set(named) == {Cause.RESHAPED}


def test_a_changed_token_is_found_whatever_its_probability(worker):
    batch = sampled(module_of(worker))
    tokens = batch.ragged("tokens")
    changed = tokens.values.clone()
    for row in (3, 7):
        changed[tokens.offsets[row + 1] - 1] += 1
    batch.batch["tokens"] = tokens.with_values(changed)
    metrics, named = read(worker, batch)
    assert set(named) == {Cause.RETOKENISED}
    assert "in 2 samples" in named[Cause.RETOKENISED]
    assert metrics["rollout/changed_samples"] == 2


def test_rounded_weights_are_numerics(worker):
    module = module_of(worker)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    metrics, named = read(worker, sampled(module))
    assert set(named) == {Cause.NUMERICS}
    assert 1e-4 < metrics["rollout/log_prob_diff_mean"] < 0.1
    assert "numerical" in named[Cause.NUMERICS] and "rollout.name=native" in named[Cause.NUMERICS]


def test_the_update_measures_what_the_recomputation_does(worker):
    """With one update per step there are no old log-probs, and the loss uses its own."""
    module = copy.deepcopy(module_of(worker))
    with torch.no_grad():
        module.get_input_embeddings().weight.mul_(1.01)
    batch = roles.with_targets(sampled(module, CUT))
    worker.compute_log_prob(batch)
    wanted = worker.take_observed().to_floats()
    old = worker.compute_log_prob(batch).rename("old_log_probs", "ref_log_probs")
    worker.take_observed()
    actor = worker._config.actor_rollout_ref.actor
    worker.parts["actor"].loss = ActorLoss.from_config(actor, recomputed=False)
    found = worker.update_actor(batch.union(old)).to_floats() | worker.take_observed().to_floats()
    names = [name for name in wanted if name.startswith("rollout/")]
    assert "rollout/kl" in names and "rollout/version_lag" in names
    for name in names:
        if name in found:
            assert found[name] == pytest.approx(wanted[name], rel=1e-9, abs=1e-15), name
    assert {name for name in names if "diff" in name or "kl" in name} <= set(found)


def evidence(**changes):
    plain: dict[str, Any] = {
        "difference": 0.1, "raised": 0.05, "limit": 0.02, "version_lag": 0, "changed_samples": 0,
        "reshaped": False, "sampled_temperature": 1.0, "temperature": 1.0,
    }  # fmt: skip
    return Evidence(**(plain | changes))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, Cause.NUMERICS),
        ({"difference": 0.02}, None),
        ({"difference": 0.02, "version_lag": 1, "reshaped": True}, None),
        ({"difference": 0.0, "changed_samples": 1}, Cause.RETOKENISED),
        ({"version_lag": 1, "raised": 0.1}, Cause.STALE),
        ({"raised": 0.096}, Cause.RESHAPED),
        ({"raised": 0.09}, Cause.NUMERICS),
        ({"reshaped": True}, Cause.RESHAPED),
        ({"sampled_temperature": 0.9}, Cause.RESHAPED),
        ({"changed_samples": 1, "version_lag": 1, "raised": 0.1}, Cause.RETOKENISED),
    ],
)
def test_the_diagnosis_by_its_evidence(changes, cause):
    assert diagnose(evidence(**changes)) is cause


def test_changed_tokens_are_no_difference_of_log_probs():
    for difference in (0.0, 0.1):
        said = sentence(Cause.RETOKENISED, evidence(difference=difference, changed_samples=3))
        assert said[0] == "T" and "3 samples" in said
        assert ("0.1 nats on average (limit 0.02)" in said) == bool(difference)


def test_each_cause_is_said_once(worker):
    said: list[str] = []
    watch = Watch(12, lambda name, sentence, step: said.append(sentence))
    metrics = {
        "rollout/log_prob_diff_mean": 1.0, "rollout/log_prob_diff_raised": 0.5,
        "rollout/log_prob_diff_limit": 0.1, "rollout/moment/p": 0.5, "rollout/moment/q": 0.5,
        "rollout/moment/pp": 0.3, "rollout/moment/qq": 0.3, "rollout/moment/pq": 0.275,
    }  # fmt: skip
    for extra in ({}, {}, {"rollout/version_lag": 1.0}, {}, {"rollout/version_lag": 1.0}):
        found = watch.check_samples(1, metrics | extra, facts())
        assert found["rollout/prob_pearson"] == pytest.approx(0.5)
    assert [Cause.NUMERICS.value in said[0], Cause.STALE.value in said[1]] == [True, True]
    assert len(said) == 2
    assert watch.check_samples(2, {"actor/loss": 1.0}, facts()) == {"actor/loss": 1.0}


def test_the_metrics_are_their_definitions():
    draw = np.random.default_rng(0)
    log_p, log_q, cut = np.log(draw.uniform(0.01, 1, size=(3, 50)))
    cut[draw.random(50) < 0.5] = np.nan
    mask = draw.random(50) < 0.7
    columns = {SAMPLED: torch.from_numpy(log_q), UNTRUNCATED: torch.from_numpy(cut)}
    metrics = Metrics()
    for part in (slice(0, 20), slice(20, 50)):
        own = {name: column[part] for name, column in columns.items()}
        add_rollout_gap(metrics, torch.from_numpy(log_p)[part], own, torch.from_numpy(mask)[part])
    raw = metrics.to_floats() | {"rollout/log_prob_diff_limit": 10.0}
    found = Watch(12, lambda name, sentence, step: None).check_samples(1, raw, facts())
    compared = np.where(np.isnan(cut), log_q, cut)[mask]
    log_p = log_p[mask]
    p, q = np.exp(log_p), np.exp(compared)
    wanted = {
        "log_prob_diff_mean": np.abs(log_p - compared).mean(),
        "log_prob_diff_max": np.abs(log_p - compared).max(),
        "log_prob_diff_raised": np.maximum(compared - log_p, 0).mean(),
        "kl": (p / q - 1 - np.log(p / q)).mean(),
        "prob_diff_mean": np.abs(p - q).mean(),
        "prob_diff_max": np.abs(p - q).max(),
        "prob_diff_share": (np.abs(p - q) > 0.01).mean(),
        "prob_pearson": np.corrcoef(p, q)[0, 1],
    }
    for name, value in wanted.items():
        assert found[f"rollout/{name}"] == pytest.approx(float(value), rel=1e-9), name
    assert pearson(0.5, 0.4, 0.25, 0.2, 0.2) is None  # nothing varies


def test_a_fingerprint_shows_any_changed_added_or_moved_token():
    row = [5, 0, 3, 3, 9]
    changed = [[*row, 0], [0, *row], row[:-1], [0, 5, 3, 3, 9], [5, 0, 3, 3, 8]]
    found = fingerprint(Ragged.from_list([row, *changed, []], torch.int64)).tolist()
    assert found[0] == sum((t + 1) * (token + 1) for t, token in enumerate(row))
    assert found[0] not in found[1:]
    assert found[-1] == 0


def test_a_batch_that_says_nothing_of_its_sampling_is_not_compared():
    tokens = Ragged.from_list([[1, 2, 3]], torch.int64)
    batch = DataProto({"tokens": tokens, "response_mask": tokens.with_values(tokens.values > 1)})
    assert gap_columns(batch) == frozenset()
    metrics = Metrics()
    add_evidence(metrics, batch, 3, 0.5)
    assert metrics.to_floats() == {"rollout/log_prob_diff_limit": 0.5}
    batch.batch[FINGERPRINT] = fingerprint(tokens)
    batch.batch["policy_version"] = tokens.with_values(torch.tensor([0, 2, 1], dtype=torch.int32))
    add_evidence(metrics, batch, 3, 0.5)
    assert metrics.to_floats() == {
        "rollout/log_prob_diff_limit": 0.5, "rollout/version_lag": 2.0, "rollout/changed_samples": 0.0,
    }  # fmt: skip


def test_the_limit_is_the_configs_or_goes_by_precision_and_temperature():
    assert difference_limit(0.3, torch.bfloat16, 0.5) == 0.3
    assert difference_limit(None, torch.bfloat16, 2.0) == LIMITS[torch.bfloat16]
    assert difference_limit(None, torch.float32, 0.1) == pytest.approx(1e-3)
