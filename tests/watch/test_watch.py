import numpy as np
import pytest
import torch

from tandem.config.rollout import RolloutConfig
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged, SamplingParams
from tandem.watch.batches import CHECK, SpecialTokens, add_checks, certain
from tandem.watch.checks import Facts
from tandem.watch.gap import SAMPLED
from tandem.watch.integrity import broken_rules
from tandem.watch.watch import Watch

FACTS = Facts(SamplingParams(temperature=1.0, max_tokens=4, seed=0), 1.0, 8, updates=1, recompute_old=False)
MOMENTS = {f"rollout/moment/{name}": value for name, value in zip(
    ("p", "q", "pp", "qq", "pq"), (0.5, 0.5, 0.3, 0.3, 0.275), strict=True
)}  # fmt: skip


def step(number):
    difference = 1e-6 if number <= 3 else 0.5
    found = {"mean": difference, "raised": difference / 2, "limit": 1e-4}
    used = 8.0 * number + (16.0 if number >= 6 else 0.0)
    rewards = {"reward/min": 0.0, "reward/mean": 0.0, "reward/max": 0.0, "training/prompts_used": used}
    return {f"rollout/log_prob_diff_{name}": value for name, value in found.items()} | rewards | MOMENTS


def test_a_resumed_run_warns_as_one_that_was_not_ended():
    for resumed_at in range(14):
        told, rows = [], []

        def tell(name, sentence, number, told=told):
            told.append((name, number))

        watch = Watch(8, tell)
        for number in range(1, 15):
            rows.append(watch.check_samples(number, step(number), FACTS))
            watch.check_learning(number, rows[-1])
            if number == resumed_at:
                before, watch = watch, Watch(8, tell)
                watch.restore(rows, before.named)
        assert told == [("leftover", 4), ("lost_prompts", 6), ("reward_constant", 10)], resumed_at


def test_a_step_that_goes_back_in_the_data_is_told():
    before = {"training/prompts_used": 24.0}
    for used, names in ((8.0, ["lost_prompts"]), (24.0, []), (32.0, []), (40.0, ["lost_prompts"])):
        found = broken_rules({"training/prompts_used": used}, before, FACTS)
        assert list(found) == names, used
        assert not found or f"ends after {used:.0f} prompts" in found["lost_prompts"]


@pytest.mark.parametrize(
    ("sampling", "likely", "early"),
    [
        ({}, 0.92, 1),
        ({}, 0.9999, 0),
        ({"top_p": 0.9}, 0.92, 0),  # this token alone fills top_p
        ({"top_p": 0.9}, 0.88, 1),
        ({"top_p": 0.9, "top_k": 2}, 0.88, 1),
        ({"top_k": 1}, 0.4, 0),
        ({"min_p": 0.5}, 0.4, 0),
    ],
)
def test_a_first_token_without_a_log_prob_is_early_unless_nothing_else_could_be_drawn(
    sampling, likely, early
):
    tokens = Ragged.from_list([[1, 2, 3]], dtype=torch.int64)
    batch = DataProto(
        {
            "tokens": tokens,
            "response_mask": tokens.with_values(torch.tensor([False, True, True])),
            SAMPLED: tokens.with_values(torch.tensor([0.0, 0.0, -1.0])),
            "old_log_probs": tokens.with_values(torch.tensor([0.0, np.log(likely), -1.0])),
            "advantages": tokens.with_values(torch.zeros(3)),
            "scores": torch.zeros(1),
        },
        {"uid": ["0-0"], "sample": [0]},
    )
    metrics = Metrics()
    add_checks(metrics, batch, SpecialTokens(), certain(RolloutConfig(name="native", **sampling)))
    assert metrics.to_floats()[f"{CHECK}early_mask"] == early
